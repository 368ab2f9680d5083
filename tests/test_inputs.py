"""Memory to run on: what is poisoned is really what the next tensors are made of."""

from __future__ import annotations

import pytest
import torch

from fusewright.inputs import poison


@pytest.mark.parametrize(("freed", "wanted"), [(300, 300), (12288, 12288), (12000, 3000)])
def test_no_freed_block_keeps_its_numbers(freed: int, wanted: int) -> None:
    """Many holes between blocks in use, as the runs of other candidates leave them."""
    model = torch.empty(wanted)
    blocks = [torch.full((freed,), 1.0) for _ in range(40)]
    del blocks[::2]
    poison([model])
    again = [torch.empty(wanted) for _ in range(20)]
    stale = max(int((each == 1.0).sum()) for each in again)
    assert stale < wanted // 20  # a few at a seam, never a row
