"""Random graphs through the whole path, forward and gradients, against float64."""

from __future__ import annotations

import pytest

from tests.fuzz import failures

COUNT, BATCH = 200, 10
# A batch is traced again if one of its outputs is a view, and twice if one of its sizes is no
# symbol's. Graphs that have that are together, or most batches would be.
VIEWS = (18, 27, 30, 89, 98, 102, 114, 115, 116, 118, 148, 186)
FIXED = (19, 37, 72, 127)


def batches() -> list[tuple[int, ...]]:
    plain = [seed for seed in range(COUNT) if seed not in {*VIEWS, *FIXED}]
    return [FIXED, VIEWS, *(tuple(plain[at : at + BATCH]) for at in range(0, len(plain), BATCH))]


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(seeds, marks=[pytest.mark.as_users_build] if number % 5 == 0 else [])
        for number, seeds in enumerate(batches())
    ],
    ids=lambda seeds: f"{min(seeds)}-{max(seeds)}",
)
def test_random_graphs(seeds: tuple[int, ...]) -> None:
    assert failures(list(seeds)) == []


def test_every_graph_is_in_one_batch() -> None:
    assert sorted(seed for seeds in batches() for seed in seeds) == list(range(COUNT))


def test_a_wrong_gradient_is_noticed() -> None:
    """The comparison itself can fail: a result that is off by one part in a thousand does."""
    import torch

    from tests.fuzz import _compare

    truth = torch.randn(100, dtype=torch.float64)
    assert _compare((truth * 1.001).float(), truth.float(), truth)
    assert not _compare(truth.float(), truth.float(), truth)
