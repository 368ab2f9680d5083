"""Optimizing a model disturbs nobody who uses the model, its arguments or PyTorch meanwhile."""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.capture.private import private
from fusewright.errors import ProblemError


def in_threads(count: int, work: Callable[[int], None]) -> list[str]:
    """Run the work in threads; what went wrong."""
    wrong: list[str] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return wrong


def test_another_thread_trains_the_model_meanwhile() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)), nn.BatchNorm1d(16), nn.Dropout())
    x, done, calls = torch.randn(4, 16), threading.Event(), 0

    def train(_: int) -> None:
        nonlocal calls
        while not done.is_set():
            model.zero_grad()
            assert model.training
            model(x).sum().backward()
            assert all(each.grad is not None for each in model.parameters())
            calls += 1

    def optimize_then_stop(_: int) -> None:
        try:
            fusewright.optimize(model, x)
        finally:
            done.set()

    assert in_threads(2, lambda n: optimize_then_stop(n) if n else train(n)) == []
    assert calls > 3


def test_threads_with_new_shapes() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16))
    fast = fusewright.optimize(model, torch.randn(3, 16))

    def call(number: int) -> None:
        x = torch.randn(2, number + 2, 16)
        torch.testing.assert_close(fast(x), model(x))

    assert in_threads(8, call) == []


class Cache:
    def __init__(self) -> None:
        self.keys: Tensor | None = None


def test_a_capture_that_fails_leaves_the_arguments_as_they_were() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.keys = x * 2
            return x + float(x.sum())

    cache, x = Cache(), torch.randn(3)
    fast = fusewright.optimize(Model(), (x, cache))
    assert cache.keys is None
    torch.testing.assert_close(fast(x, cache), x + float(x.sum()))
    torch.testing.assert_close(cache.keys, x * 2)


def test_gradients_of_a_model_that_was_optimized_without() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    for without in (torch.inference_mode, torch.no_grad):
        with without():
            fast = fusewright.optimize(model, x)
        model.zero_grad()
        fast(x).sum().backward()
        found = [each.grad for each in model.parameters()]
        model.zero_grad()
        model(x).sum().backward()
        torch.testing.assert_close(found, [each.grad for each in model.parameters()])


class Uncopied(nn.Module):
    """A model with an attribute that cannot be copied, tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(4))
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.second(self.first(x)) + self.shift


class Copied(Uncopied):
    def __init__(self) -> None:
        super().__init__()
        del self.lock
        self.state = self.first.weight.sum()  # not a leaf

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.shift


@pytest.mark.parametrize("kind", [Uncopied, Copied])
def test_a_private_copy_shares_memory_and_nothing_else(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(2, 4)
    mine, (given,), _ = private(model, (x,), None)
    assert given is x and type(mine) is kind
    pairs = [*zip(mine.parameters(), model.parameters(), strict=True)]
    pairs += zip(mine.buffers(), model.buffers(), strict=True)
    for one, other in pairs:
        assert one is not other and one.data_ptr() == other.data_ptr()
        assert type(one) is type(other) and one.requires_grad == other.requires_grad
    assert mine.first is not model.first and mine.second.weight is mine.first.weight
    mine.eval().requires_grad_(False)
    assert model.second.training and model.first.weight.requires_grad
    torch.testing.assert_close(mine(x), model(x))
    fusewright.optimize(model, x)


def test_a_function_that_holds_a_module_keeps_the_model() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model.again = lambda x: model[0](x)
    assert private(model, (), None)[0] is model


@pytest.mark.parametrize("modes", ["train", ("bogus",), (), 3])
def test_unknown_modes_are_refused(modes: Any) -> None:
    with pytest.raises(ProblemError, match='it is a tuple of "train", "eval" or both'):
        fusewright.optimize(nn.ReLU(), torch.randn(3), modes=modes)


def test_a_function_with_inputs_is_refused_with_the_way_to_do_it() -> None:
    with pytest.raises(ProblemError, match=r"leave the inputs out: optimize\(function\)"):
        fusewright.optimize(torch.relu, torch.randn(3))


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C, by a timer."""


def _interrupt(*_: Any) -> None:
    raise _Interrupted


class _Fills(nn.Module):
    """Writes into its argument and into itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.log = nn.Linear(8, 8), nn.BatchNorm1d(8), [1.0]

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.norm(torch.relu(self.layer(x)))
        cache["last"] = found.detach()
        self.log.append(1.0)
        return found


def _everything(model: nn.Module) -> dict[str, Any]:
    tensors = model.state_dict(keep_vars=True)
    held: dict[str, Any] = {n: (id(t), t.tolist(), t.grad) for n, t in tensors.items()}
    for path, module in model.named_modules():
        tables = {n: repr(v) for n, v in vars(module).items() if not isinstance(v, nn.Module)}
        held |= {f"{path} {name}": value for name, value in tables.items()}
    return held | {"needs": [(id(p), p.requires_grad) for p in model.parameters()]}


def _process() -> list[Any]:
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    asked = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *modes
    return [*asked, torch.get_rng_state().tolist(), list(warnings.filters)]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there is no timer")
@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.9])
def test_an_interrupted_optimize_leaves_everything_as_it_was(share: float) -> None:
    model, x, cache = _Fills(), torch.randn(4, 8), dict[str, Tensor]()
    start = time.perf_counter()
    fusewright.optimize(copy.deepcopy(model), (x, {}))
    took = time.perf_counter() - start
    torch._dynamo.reset()
    before, around = _everything(model), _process()
    handler = signal.signal(signal.SIGALRM, _interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, took * share)
        with contextlib.suppress(_Interrupted):
            fusewright.optimize(model, (x, cache))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert (_everything(model), _process(), cache) == (before, around, {})
    wanted = copy.deepcopy(model)(x, {})
    torch.testing.assert_close(fusewright.optimize(model, (x, {}))(x, {}), wanted)
