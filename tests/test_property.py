"""Random graphs through the whole path, forward and gradients, against float64."""

from __future__ import annotations

import pytest

from tests.fuzz import failures

BATCH = 10


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.as_users_build] if first % 50 == 0 else [])
        for first in range(0, 200, BATCH)
    ],
)
def test_random_graphs(first: int) -> None:
    assert failures(list(range(first, first + BATCH))) == []


def test_a_wrong_gradient_is_noticed() -> None:
    """The comparison itself can fail: a result that is off by one part in a thousand does."""
    import torch

    from tests.fuzz import _compare

    truth = torch.randn(100, dtype=torch.float64)
    assert _compare((truth * 1.001).float(), truth.float(), truth)
    assert not _compare(truth.float(), truth.float(), truth)
