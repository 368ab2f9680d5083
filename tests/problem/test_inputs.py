"""Memory to run on: what is poisoned is really what the next tensors are made of."""

from __future__ import annotations

import pytest
import torch

from fusewright.problem.inputs import poisoned_memory


@pytest.mark.parametrize(("freed", "wanted"), [(300, 300), (12288, 12288), (12000, 3000)])
def test_no_freed_block_keeps_its_numbers(freed: int, wanted: int) -> None:
    """Many holes between blocks in use, as the runs of other candidates leave them."""
    model = torch.empty(wanted)
    blocks = [torch.full((freed,), 1.0) for _ in range(200)]
    del blocks[::2]
    with poisoned_memory([model]):
        again = [torch.empty(wanted) for _ in range(100)]
    stale = max(int((each == 1.0).sum()) for each in again)
    assert stale == 0


def test_what_is_written_stays() -> None:
    with poisoned_memory([torch.empty(100)]):
        ones = torch.ones(100)
    assert bool((ones == 1).all())
