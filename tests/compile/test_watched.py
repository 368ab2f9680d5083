"""Python state that forward reads and somebody changes between two calls: eager is the truth."""

from __future__ import annotations

import enum
import random
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import is_grad_enabled as wants_gradients
from torch.nn.utils import parametrize

import fusewright
from fusewright.capture.unguarded import trust
from fusewright.compile.module import Optimized
from fusewright.runtime import call
from tests.support import other_globals
from tests.support.other_globals import activated, configured, scaled


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


def halved(x: Tensor) -> Tensor:
    return x / 2


def doubled(x: Tensor) -> Tensor:
    return x * 2


def by_list(_: Any, x: Tensor, factors: list[float] = [2.0]) -> Tensor:  # noqa: B006
    return x * factors[0]


KIND = Kind.ONE
# Of the same name, as two lambdas are.
FIRST, SECOND = (lambda x: x * 2), (lambda x: x * 3)
CHOSEN = halved
GENERATOR = np.random.default_rng(0)
PYTHONS = random.Random(0)


class Model(nn.Module):
    """Reads one thing that changes between calls."""

    kind = Kind.ONE
    chosen = staticmethod(halved)
    of_class: Any = SimpleNamespace(scale=2.0)

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.layer = nn.Linear(4, 4)
        self.settings = SimpleNamespace(scale=2.0)
        self.names: dict[str, float] = {}
        self.own_kind = Kind.ONE
        self.steps = [FIRST]
        self.step_by_name = {"first": FIRST}
        self.pair = (FIRST, 2.0)
        self.layered = (1.0, [2.0])
        self.long = [1.0] * 100

    def method(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, self.layer(x).relu())


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda m: globals().__setitem__(name, value)


Case = tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], Any]]
CHANGES: dict[str, Case] = {
    "global of another file": (
        lambda m, x: scaled(x),
        lambda m: setattr(other_globals, "SCALE", 5.0),
    ),
    "attribute of another file": (
        lambda m, x: x * other_globals.SCALE,
        lambda m: setattr(other_globals, "SCALE", 5.0),
    ),
    "object of another file": (
        lambda m, x: configured(x),
        lambda m: setattr(other_globals.SETTINGS, "scale", 5.0),
    ),
    "new attribute of an object": (
        lambda m, x: configured(x),
        lambda m: setattr(other_globals.SETTINGS, "extra", 5.0),
    ),
    "new key of another file": (
        lambda m, x: configured(x),
        lambda m: other_globals.NAMES.update(extra=3.0),
    ),
    "function of another file": (
        lambda m, x: activated(x),
        lambda m: setattr(other_globals, "activation", torch.tanh),
    ),
    "missing attribute of settings": (
        lambda m, x: x * getattr(m.settings, "extra", 1.0),
        lambda m: setattr(m.settings, "extra", 5.0),
    ),
    "missing attribute of a class's object": (
        lambda m, x: x * (5.0 if hasattr(m.of_class, "extra") else 1.0),
        lambda m: setattr(Model.of_class, "extra", 5.0),
    ),
    "missing attribute of the model": (
        lambda m, x: x * getattr(m, "extra", 1.0),
        lambda m: setattr(m, "extra", 5.0),
    ),
    "missing attribute that becomes None": (
        lambda m, x: x * (5.0 if hasattr(m, "extra") else 1.0),
        lambda m: setattr(m, "extra", None),
    ),
    "missing attribute of a layer": (
        lambda m, x: x * getattr(m.layer, "extra", 1.0),
        lambda m: setattr(m.layer, "extra", 5.0),
    ),
    "missing key": (lambda m, x: x * m.names.get("k", 1.0), lambda m: m.names.update(k=5.0)),
    "key that is asked for": (
        lambda m, x: x * (5.0 if "k" in m.names else 1.0),
        lambda m: m.names.update(k=5.0),
    ),
    "enum": (
        lambda m, x: x * (2 if m.own_kind is Kind.ONE else 3),
        lambda m: setattr(m, "own_kind", Kind.TWO),
    ),
    "enum of the class": (
        lambda m, x: x * (2 if m.kind is Kind.ONE else 3),
        lambda m: setattr(Model, "kind", Kind.TWO),
    ),
    "enum in a global": (
        lambda m, x: x * (2 if KIND is Kind.ONE else 3),
        _set("KIND", Kind.TWO),
    ),
    "function in a global": (lambda m, x: CHOSEN(x), _set("CHOSEN", doubled)),
    "function of the class": (
        lambda m, x: m.chosen(x),
        lambda m: setattr(Model, "chosen", staticmethod(doubled)),
    ),
    "method that an attribute hides": (
        lambda m, x: m.method(x),
        lambda m: setattr(m, "method", halved),
    ),
    "function in a list": (
        lambda m, x: m.steps[0](x),
        lambda m: setattr(m, "steps", [SECOND]),
    ),
    "function put into a list": (
        lambda m, x: m.steps[0](x),
        lambda m: m.steps.__setitem__(0, SECOND),
    ),
    "function in a dict": (
        lambda m, x: m.step_by_name["first"](x),
        lambda m: m.step_by_name.update(first=SECOND),
    ),
    "function in a tuple": (
        lambda m, x: m.pair[0](x) * m.pair[1],
        lambda m: setattr(m, "pair", (SECOND, 2.0)),
    ),
    "list in a tuple": (
        lambda m, x: x * m.layered[1][0] * m.settings.scale,
        lambda m: m.layered[1].__setitem__(0, 5.0),
    ),
    "long list": (lambda m, x: x * m.long[70], lambda m: m.long.__setitem__(70, 5.0)),
    "default argument": (by_list, lambda m: by_list.__defaults__[0].__setitem__(0, 5.0)),
    "whether weights need gradients": (
        lambda m, x: x * (2 if m.layer.weight.requires_grad else 3),
        lambda m: m.layer.weight.requires_grad_(False),
    ),
    "gradient of a weight": (
        lambda m, x: x * (2 if m.layer.weight.grad is None else 3),
        lambda m: setattr(m.layer.weight, "grad", torch.ones(4, 4)),
    ),
    "version of a weight": (
        lambda m, x: x * m.layer.bias._version,
        lambda m: m.layer.bias.detach().add_(0),
    ),
}


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    call._FW_WARNED.clear()
    for name in ("SCALE", "activation"):
        monkeypatch.setattr(other_globals, name, getattr(other_globals, name))
    monkeypatch.setattr(other_globals, "SETTINGS", SimpleNamespace(scale=2.0))
    monkeypatch.setattr(other_globals, "NAMES", {})
    for name in ("kind", "chosen"):
        monkeypatch.setattr(Model, name, vars(Model)[name])
    monkeypatch.setattr(Model, "of_class", SimpleNamespace(scale=2.0))
    for name in ("KIND", "CHOSEN"):
        monkeypatch.setitem(globals(), name, globals()[name])
    yield
    by_list.__defaults__[0][0] = 2.0
    torch._dynamo.reset()


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def forward(model: nn.Module, *args: Any) -> Any:
    """Eager's answer for the same state."""
    kind = model._fw_original if isinstance(model, Optimized) else type(model)
    return kind.forward(model, *args)


@pytest.mark.filterwarnings("ignore:the original forward runs")
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CHANGES)
def test_state_that_changes_between_calls(name: str) -> None:
    read, change = CHANGES[name]
    model, x = Model(read), torch.randn(3, 4, requires_grad=True)
    fast = fusewright.optimize(model, x)
    before = forward(fast, x)
    same(fast(x), before)
    same(fast(x), before)
    change(fast)
    wanted = forward(fast, x)
    assert not torch.equal(wanted, before)
    for _ in range(2):
        same(fast(x), wanted)
    same(torch.autograd.grad(fast(x).sum(), x), torch.autograd.grad(wanted.sum(), x))


def test_watched_objects_that_stay_cost_no_program() -> None:
    model, x = Model(lambda m, x: CHOSEN(m.chosen(activated(x)))), torch.randn(3, 4)
    assert {each[1] for each in trust(model, (x,), {}).watched} == {
        *("CHOSEN", "activated", "activation", "chosen", "forward", "linear")
    }
    fast = fusewright.optimize(model, x)
    for _ in range(3):
        fast(x)
    globals()["CHOSEN"] = doubled
    same(fast(x), forward(fast, x))
    globals()["CHOSEN"] = halved
    same(fast(x), forward(fast, x))
    assert len(fast.__dict__["_fw_engine"].modes) == 3, "both modes, and the other function once"


class Scaled(nn.Module):
    """A user's class; parametrize makes a subclass of it in a module of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.scale = 2.0
        self.settings = SimpleNamespace(scale=2.0)
        self.factors = [2.0]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale * self.settings.scale * self.factors[0]


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "scale", 5.0),
        lambda m: setattr(m.settings, "scale", 5.0),
        lambda m: m.factors.__setitem__(0, 5.0),
    ],
)
def test_parametrized_classes_of_the_user(inside: bool, change: Callable[[Any], None]) -> None:
    part, x = Scaled(), torch.randn(3, 4)
    parametrize.register_parametrization(part, "weight", Doubled())
    fast = fusewright.optimize(nn.Sequential(part) if inside else part, x)
    same(fast(x), forward(fast, x))
    change(fast[0] if inside else fast)
    same(fast(x), forward(fast, x))


class Distance:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x - y) * self.factor).abs().sum(-1)


def test_a_callable_inside_a_layer_of_pytorch() -> None:
    layer = nn.TripletMarginWithDistanceLoss(distance_function=Distance(2.0))
    given = (torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4))
    fast = fusewright.optimize(layer, given)
    same(fast(*given), layer(*given))
    layer.distance_function.factor = 3.0
    same(fast(*given), layer(*given))


class Asks(nn.Module):
    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.read(x, y)


def test_another_name_for_a_function_that_is_asked() -> None:
    fast, x = fusewright.optimize(Asks(lambda x, y: x * (2 if wants_gradients() else 3)),
                                  torch.randn(3)), torch.randn(3)  # fmt: skip
    same(fast(x), x * 2)
    with torch.no_grad():
        same(fast(x), x * 3)


@pytest.mark.filterwarnings("ignore:the original forward runs")
@pytest.mark.parametrize("fact", ["requires_grad", "is_leaf"])
def test_facts_of_an_argument(fact: str) -> None:
    # With `getattr`, the name would be known only to Dynamo.
    read = {"requires_grad": lambda x, y: x * (2 if x.requires_grad else 3),
            "is_leaf": lambda x, y: x * (2 if x.is_leaf else 3)}[fact]  # fmt: skip
    leaf = torch.randn(3, requires_grad=True)
    fast = fusewright.optimize(Asks(read), leaf)
    for x in (leaf, leaf * 1, leaf.detach()):
        same(fast(x), read(x, None))


def test_the_same_tensor_twice() -> None:
    def read(x: Tensor, y: Any) -> Tensor:
        return x * 2 if x is y else x * 3

    x, y = torch.randn(3), torch.randn(3)
    for example in ((x, y), (x, x)):
        fast = fusewright.optimize(Asks(read), example)
        for _ in range(2):
            same(fast(x, y), x * 3)
            same(fast(x, x), x * 2)


DRAWS: dict[str, Callable[[Any, Any], Tensor]] = {
    "random": lambda x, y: x * random.random(),
    "random choice": lambda x, y: x * random.choice([1.0, 2.0, 3.0]),
    "numpy": lambda x, y: x * float(np.random.rand()),
    "numpy array": lambda x, y: x + torch.from_numpy(np.random.rand(3)),
    "generator of numpy": lambda x, y: x * float(GENERATOR.random()),
    "choice of numpy": lambda x, y: x * float(GENERATOR.choice([1.0, 2.0, 3.0])),
    "generator of Python": lambda x, y: x * PYTHONS.random(),
}


def _seed() -> None:
    random.seed(3)
    np.random.seed(3)
    PYTHONS.seed(3)
    GENERATOR.bit_generator.state = np.random.default_rng(3).bit_generator.state


@pytest.mark.filterwarnings("ignore:the original forward runs")
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_python_and_numpy_are_drawn_at_each_call(name: str) -> None:
    model, x = Asks(DRAWS[name]), torch.ones(3, dtype=torch.float64)
    fast = fusewright.optimize(model, x)
    fast(x)  # Dynamo draws nothing itself, but it may run the call
    _seed()
    wanted = [model(x) for _ in range(6)]
    _seed()
    same([fast(x) for _ in range(6)], wanted)
    assert len({each[0].item() for each in wanted}) > 1


def test_warnings_as_errors_while_dynamo_traces() -> None:
    read = lambda x, y: x * 2 if x.grad is None else x * 3  # noqa: E731
    leaf = torch.randn(3, requires_grad=True)
    fast = fusewright.optimize(Asks(read), leaf)
    x = leaf * 1
    x.retain_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the original forward runs")
        same(fast(x), x * 2)


def _wrapped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: function(*args)


class Helped(nn.Module):
    """Calls functions that are found in an enclosing variable, a global and the class."""

    @_wrapped
    def forward(self, x: Tensor) -> Tensor:
        return CHOSEN(self.twice(x))

    @staticmethod
    def twice(x: Tensor) -> Tensor:
        return x * 2


def test_watched_functions_inside_torch_compile() -> None:
    x = torch.randn(3)
    fast = fusewright.optimize(Helped(), x)
    assert fast.__dict__["_fw_engine"].modes
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    same(compiled(x), x)
    globals()["CHOSEN"] = doubled
    same(torch.compile(fast, backend="eager")(x), x * 4)


class Broken(nn.Module):
    """Dynamo cannot trace it as a whole."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.read, self.scale, self.settings = read, 2.0, SimpleNamespace(scale=2.0)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.read(self, x)


UNTRACED: dict[str, Case] = {
    "attribute": (lambda m, x: x * m.scale, lambda m: setattr(m, "scale", 5.0)),
    "object": (lambda m, x: x * m.settings.scale, lambda m: setattr(m.settings, "scale", 5.0)),
    "global": (
        lambda m, x: x * other_globals.SCALE,
        lambda m: setattr(other_globals, "SCALE", 5.0),
    ),
    "global of another file": (
        lambda m, x: scaled(x),
        lambda m: setattr(other_globals, "SCALE", 5.0),
    ),
}


@pytest.mark.parametrize("name", UNTRACED)
def test_a_model_that_dynamo_cannot_trace_as_a_whole(name: str) -> None:
    read, change = UNTRACED[name]
    fast, x = fusewright.optimize(Broken(read), torch.randn(3)), torch.randn(3)
    assert bool(fast.__dict__["_fw_engine"].modes) == (name == "attribute")
    same(fast(x), x * 2)
    change(fast)
    same(fast(x), x * 5)
