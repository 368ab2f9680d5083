"""What our guards do not compare: calls agree with eager whatever changes between them."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import UserDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.capture.unguarded import trust
from fusewright.compile import backend as compiling
from tests.support.models import Lambda

SCALE = 2.0
SETTINGS = SimpleNamespace(scale=2.0)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@dataclasses.dataclass
class Batch:
    x: Tensor


class Times:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


class Model(nn.Module):
    """Reads one thing that changes between calls."""

    kept = 2.0

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.layer = nn.Linear(4, 4)
        self.settings = SimpleNamespace(scale=2.0)
        self.clamp = functools.partial(torch.clamp, min=0.0)
        self.times = Times(2.0)
        self.tensors = [torch.ones(4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, self.layer(x).relu())


def _set_global(value: float) -> None:
    globals()["SCALE"] = value


def _enclosed() -> tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], None]]:
    factor = 2.0

    def read(_: Any, x: Tensor) -> Tensor:
        return x * factor

    def change(_: Any) -> None:
        nonlocal factor
        factor = 5.0

    return read, change


CHANGES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], None]]] = {
    "attribute of an object": (
        lambda m, x: x * m.settings.scale,
        lambda m: setattr(m.settings, "scale", 7.0),
    ),
    "another object": (
        lambda m, x: x * m.settings.scale,
        lambda m: setattr(m, "settings", SimpleNamespace(scale=5.0)),
    ),
    "partial": (
        lambda m, x: m.clamp(x),
        lambda m: setattr(m, "clamp", functools.partial(torch.clamp, min=0.5)),
    ),
    "callable": (lambda m, x: m.times(x), lambda m: setattr(m, "times", Times(3.0))),
    "class attribute": (lambda m, x: x * m.kept, lambda m: setattr(Model, "kept", 5.0)),
    "enclosed value": _enclosed(),
    "global value": (lambda m, x: x * SCALE, lambda m: _set_global(5.0)),
    "object of the module": (
        lambda m, x: x * SETTINGS.scale,
        lambda m: setattr(SETTINGS, "scale", 5.0),
    ),
    "tensor in a list": (
        lambda m, x: x * m.tensors[0],
        lambda m: m.tensors.__setitem__(0, torch.full((4,), 3.0)),
    ),
    "list of tensors": (
        lambda m, x: sum((x * each for each in m.tensors), x),
        lambda m: m.tensors.append(torch.ones(4)),
    ),
    "method of a submodule": (
        lambda m, x: m.layer(x),
        lambda m: setattr(m.layer, "forward", lambda x: x @ m.layer.weight * 9),
    ),
    "deterministic algorithms": (
        lambda m, x: x * (2 if torch.are_deterministic_algorithms_enabled() else 3),
        lambda m: torch.use_deterministic_algorithms(True),
    ),
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    Model.kept, SETTINGS.scale = 2.0, 2.0
    _set_global(2.0)
    torch.use_deterministic_algorithms(False)


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:the original forward runs")
@pytest.mark.parametrize("name", CHANGES)
def test_state_that_changes_between_calls(name: str) -> None:
    read, change = CHANGES[name]
    model, x = Model(read), torch.randn(3, 4)
    fast = fusewright.optimize(model, x)
    same(fast(x), model(x))
    change(fast)
    wanted = Model.forward(fast, x)
    same(fast(x), wanted)
    same(torch.autograd.grad(fast(x).sum(), fast.layer.weight, allow_unused=True)[0],
         torch.autograd.grad(wanted.sum(), fast.layer.weight, allow_unused=True)[0])  # fmt: skip


@pytest.mark.parametrize("make", [Batch, lambda x: UserDict(x=x), lambda x: SimpleNamespace(x=x)])
def test_tensors_inside_objects(make: Callable[[Tensor], Any]) -> None:
    class Takes(nn.Module):
        def forward(self, batch: Any) -> Tensor:
            x = batch["x"] if isinstance(batch, UserDict) else batch.x
            return x.relu() * 2

    fast = fusewright.optimize(Takes(), (make(torch.randn(3, 4)),))
    x = torch.randn(3, 4, requires_grad=True)
    same(fast(make(x)), x.relu() * 2)
    same(torch.autograd.grad(fast(make(x)).sum(), x)[0], (x > 0) * 2.0)


def test_a_forward_that_asks_whether_gradients_are_wanted() -> None:
    model = Lambda(lambda x: x * 2 if torch.is_grad_enabled() else x * 3)
    fast, x = fusewright.optimize(model, torch.randn(3)), torch.randn(3)
    same(fast(x), x * 2)
    with torch.no_grad():
        same(fast(x), x * 3)


class Fills(nn.Module):
    def forward(self, x: Tensor, into: Any) -> Tensor:
        if isinstance(into, dict):
            into["more"] = x * 2
        else:
            into.append(x * 2)
        return x + 1


@pytest.mark.parametrize("kind", [dict, list])
def test_a_forward_may_write_into_its_arguments(kind: Any) -> None:
    into, theirs = kind(), kind()
    fast = fusewright.optimize(Fills(), (torch.randn(3), into))
    assert into == kind()
    for _ in range(2):
        x = torch.randn(3)
        torch.testing.assert_close(fast(x, into), Fills()(x, theirs))
        torch.testing.assert_close(into, theirs)


def test_fifteen_lengths_and_numbers_need_two_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))

        def forward(self, x: Tensor, factor: float) -> Tensor:
            return self.layers(x).relu() * factor

    built: list[str] = []
    real = compiling._compiled
    monkeypatch.setattr(compiling, "_compiled", lambda *a: built.append(a[0]) or real(*a))
    model = Scales()
    with torch.no_grad():
        fast = fusewright.optimize(model, (torch.randn(2, 5, 8), 1.0))
        for length in range(3, 18):
            x = torch.randn(2, length, 8)
            same(fast(x, length / 2), model(x, length / 2))
    assert built == ["inference"]
    assert len(fast.__dict__["_fw_engine"].modes) == 2, "one program for each mode"


@pytest.mark.parametrize("name", ["attribute of an object", "global value"])
def test_the_reason_names_what_is_read(name: str) -> None:
    reason = trust(Model(CHANGES[name][0]), (torch.randn(3, 4),), {}).reason
    assert reason == f"forward reads {'SCALE' if name == 'global value' else 'self.settings'}"


class Attends(nn.Module):
    """Attention that PyTorch's own code decides how to run, by many settings."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0] * self.scale


PLAIN = {
    "layers": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Dropout()),
    "encoder": nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "recurrent": nn.GRU(4, 4),
    "attention": Attends(),
    "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_models_of_pytorchs_own_layers_are_guarded_by_us(name: str) -> None:
    for training in (True, False):
        found = trust(PLAIN[name].train(training), (torch.randn(3, 4),), {})
        assert found.reason == ""


def test_pytorch_logs_nothing_while_it_lists_what_forward_reads() -> None:
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger("torch._dynamo")
    root.addHandler(handler)
    try:
        trust(Lambda(lambda x: x * SCALE), (torch.randn(3),), {})
    finally:
        root.removeHandler(handler)
    assert not logged
