"""Poisoned memory: the next tensors are allocated from it."""

from __future__ import annotations

import pytest
import torch

from fusewright.problem.inputs import memory_blocks, poisoned_memory


@pytest.mark.parametrize(("freed", "wanted"), [(300, 300), (12288, 12288), (12000, 3000)])
def test_no_freed_block_keeps_its_values(freed: int, wanted: int) -> None:
    """Many holes between blocks in use, as runs of other candidates leave them."""
    model = torch.empty(wanted)
    blocks = [torch.full((freed,), 1.0) for _ in range(200)]
    del blocks[::2]
    with poisoned_memory(memory_blocks([model])):
        again = [torch.empty(wanted) for _ in range(100)]
    stale = max(int((each == 1.0).sum()) for each in again)
    assert stale == 0


def test_values_written_to_it_stay() -> None:
    with poisoned_memory(memory_blocks([torch.empty(100)])):
        ones = torch.ones(100)
    assert bool((ones == 1).all())
