"""What Dynamo does to others, and others to Dynamo: threads, traces, effects before a failure."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fusewright

SETTINGS = {"scale": 2.0}


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Reading(nn.Module):
    """By way of Dynamo, for the sake of a global."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) * SETTINGS["scale"]


def test_calls_go_on_while_another_thread_traces() -> None:
    fast, x = fusewright.optimize(Reading(), torch.randn(4, 8)), torch.randn(4, 8)
    expected, stop, errors, calls = fast(x).detach(), threading.Event(), [], 0

    def call() -> None:
        nonlocal calls
        while not stop.is_set():
            try:
                torch.testing.assert_close(fast(x), expected)
                calls += 1
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=call)
    thread.start()
    try:
        for width in (3, 5):
            fusewright.optimize(
                nn.Sequential(nn.Linear(width, 4), nn.GELU()), torch.randn(2, width)
            )
    finally:
        stop.set()
        thread.join(60)
    assert not errors and calls > 10


def test_a_model_with_a_compiled_part_beside_a_first_call() -> None:
    """Our lock and Dynamo's are one: with two, each thread could wait for the other's."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.compile(nn.Linear(8, 8), backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.part(x)) * 2

    x = torch.randn(4, 8)
    fast = fusewright.optimize(Reading(), x)
    first = threading.Thread(target=lambda: fast(x), daemon=True)
    second = threading.Thread(target=lambda: fusewright.optimize(Inner(), x), daemon=True)
    for each in (first, second):
        each.start()
    for each in (first, second):
        each.join(90)
        assert not each.is_alive()


def test_what_only_one_mode_reads_counts_for_both() -> None:
    def look(y: Tensor, x: Tensor) -> Tensor:
        return y + x._version

    class Modes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * SETTINGS["scale"]
            return y if self.training else look(y, x)

    x, y = torch.ones(3), torch.ones(3)
    fast, model = fusewright.optimize(Modes(), torch.ones(3)).eval(), Modes().eval()
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(y))
        x.mul_(1)
        y.mul_(1)


class Counting(nn.Module):
    """Counts, then a graph break, then a product that fits 3 columns only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.weight, self.calls = nn.Parameter(torch.randn(3, 3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        self.calls += 1
        if float(x.sum()) > -1e9:
            x = x + 1
        return x @ self.weight


def test_a_call_that_fails_halfway_has_its_effects_once() -> None:
    model = Counting()
    theirs = copy.deepcopy(model)
    fast = fusewright.optimize(model, torch.randn(4, 3))
    for columns in (3, 5, 3):
        x = torch.randn(4, columns)
        if columns == 5:
            for each in (fast, theirs):
                with pytest.raises(RuntimeError):
                    each(x)
        else:
            torch.testing.assert_close(fast(x), theirs(x))
        assert (fast.seen, fast.calls) == (theirs.seen, theirs.calls)
    assert not fusewright.explain(fast).fallbacks


def test_the_forward_of_the_class_may_be_replaced() -> None:
    class Replaced(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + 1

    fast, x = fusewright.optimize(Replaced(), torch.randn(3)), torch.randn(3)
    torch.testing.assert_close(fast(x), x * 2 + 1)
    Replaced.forward = lambda self, x: x - 5  # type: ignore[method-assign]
    torch.testing.assert_close(fast(x), Replaced()(x))


def test_a_global_generator_is_left_as_it_was() -> None:
    generator = torch.Generator().manual_seed(3)

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(x.shape, generator=generator)

    before = generator.get_state()
    fusewright.optimize(Draws(), torch.randn(3))
    assert torch.equal(generator.get_state(), before)
