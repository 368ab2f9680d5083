"""Figures are the same whether a tensor is measured as a whole or chunk by chunk."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusewright.verify import figures
from fusewright.verify.compare import Values, compare
from fusewright.verify.figures import chunks, measure, peak_of, root_mean_square, same_values


@pytest.mark.parametrize("shape", [(), (7,), (5, 1, 9), (2, 3, 40), (0, 4), (3, 0)])
@pytest.mark.parametrize("most", [1, 8, 1000])
def test_chunks_cover_every_element_once(shape: tuple[int, ...], most: int) -> None:
    seen = torch.zeros(shape)
    for index in chunks(shape, most):
        assert seen[index].numel() <= most
        seen[index] += 1
    assert bool((seen == 1).all())


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_CHUNK", {"cpu": 13})


def values() -> tuple[Tensor, Tensor, Tensor]:
    truth = torch.randn(9, 31, dtype=torch.float64)
    eager = (truth * (1 + 1e-7)).float()
    return eager + 1e-6 * torch.randn(9, 31), eager, truth


@pytest.mark.usefixtures("small_chunks")
def test_chunks_change_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, eager, truth = values()
    ours[3, 4], eager[3, 4], truth[3, 4] = math.nan, math.nan, math.nan
    ours[5, 5], eager[5, 5], truth[5, 5] = math.inf, math.inf, math.inf
    # Other strides, as those of channels-last results.
    ours = ours.t().contiguous().t()
    runs = (ours, eager, None, ours[:2])
    parts = measure(truth, eager, runs, 1e-6)
    peak, rms = peak_of(ours), root_mean_square(ours)
    monkeypatch.setattr(figures, "_CHUNK", {"cpu": 10**6})
    whole = measure(truth, eager, runs, 1e-6)
    assert parts.count == whole.count == 9 * 31 and parts.peak == whole.peak
    assert parts.squares == pytest.approx(whole.squares)
    assert parts.runs[2:] == whole.runs[2:] == (None, None)
    for mine, theirs in zip(parts.runs[:2], whole.runs[:2], strict=True):
        assert mine is not None and theirs is not None
        assert mine.squares == pytest.approx(theirs.squares) and not mine.misplaced
        assert (mine.largest, mine.beyond) == (theirs.largest, theirs.beyond)
    assert peak == peak_of(ours) and rms == pytest.approx(root_mean_square(ours))


@pytest.mark.usefixtures("small_chunks")
def test_what_is_wrong_in_the_last_chunk_is_found() -> None:
    ours, eager, truth = values()
    ours = eager.clone()
    assert compare("y", Values(ours, eager, truth, 1.0)).ok
    ours[-1, -1] += 1e-3
    assert not compare("y", Values(ours, eager, truth, 1.0)).ok
    ours[-1, -1] = math.nan
    assert not compare("y", Values(ours, eager, truth, 1.0)).ok
    whole = torch.arange(60).reshape(6, 10)
    other = whole.clone()
    other[-1, -1] = 0
    assert compare("i", Values(whole.clone(), whole, whole, 1.0)).ok
    assert not compare("i", Values(other, whole, whole, 1.0)).ok
    assert same_values(whole, whole.clone()) and not same_values(whole, other)
    nan = torch.full((40,), math.nan)
    assert same_values(nan, nan.clone()) and not same_values(nan, torch.zeros(40))


def test_numbers_whose_squares_overflow_are_compared() -> None:
    eager = torch.full((4,), 1e200, dtype=torch.float64)
    assert compare("y", Values(eager.clone(), eager, None, 1.0)).error == 0.0
