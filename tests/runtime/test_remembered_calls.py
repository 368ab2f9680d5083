"""Calls like the last that fitted skip the guards: never one that the guards would refuse."""

from __future__ import annotations

import ast
import copy
import inspect
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusewright
from fusewright.compile.engine import ENGINE
from fusewright.compile.module import optimized
from fusewright.runtime import call, cuda, guard, host, library, operators, tensor_cores
from tests.support.handmade import gemm_add_relu
from tests.support.misfits import Made, misfits, no_program
from tests.support.tensors import assert_same


@pytest.fixture(scope="module")
def gemm(tmp_path_factory: pytest.TempPathFactory) -> Made:
    case = gemm_add_relu()
    return case, case.modes(tmp_path_factory.mktemp("gemm"))


def with_misfit(mode: call._FwMode, misfit: Any) -> call._FwMode:
    return call._FwMode(**vars(mode) | {"misfit": misfit})


def fresh(made: Made, asked: list[str]) -> nn.Module:
    """An optimized copy that remembers nothing yet; `asked` gets the name of each guard run."""

    def watched(mode: call._FwMode) -> call._FwMode:
        def misfit(*tensors: torch.Tensor) -> str | None:
            asked.append(mode.name)
            reason: str | None = mode.misfit(*tensors)
            return reason

        return with_misfit(mode, misfit)

    modes = tuple(watched(mode) for mode in made[1])
    return optimized(copy.deepcopy(made[0].model), modes, no_program)


def test_the_guards_run_once_for_calls_alike(gemm: Made) -> None:
    asked: list[str] = []
    fast = fresh(gemm, asked)
    for rows, new in (
        (4, 1),
        (4, 0),
        (7, 1),
        (7, 0),
        (4, 0),
        (1, 1),
        (2, 1),
        (3, 1),
        (7, 0),
        (4, 1),
    ):
        x, before = torch.randn(rows, 3), len(asked)
        assert_same(fast(x), torch.relu(x @ fast.gemm.weight.t() + fast.bias))
        assert len(asked) - before == new
    fast.bias = nn.Parameter(torch.zeros(5))
    assert_same(fast(x), torch.relu(x @ fast.gemm.weight.t()))
    fast.gemm.weight.data = torch.zeros(5, 3)
    assert_same(fast(x), torch.zeros(4, 5))
    assert len(asked) == 6, "other tensors of the same kind are no other kind of call"


def test_a_program_behind_one_that_refuses_is_remembered_too(gemm: Made) -> None:
    refused: list[int] = []
    modes = (
        with_misfit(gemm[1][0], lambda *_: refused.append(1) or "too small a batch"),
        gemm[1][0],
    )
    fast = optimized(copy.deepcopy(gemm[0].model), modes, no_program)
    first, second = [fast(torch.ones(4, 3)) for _ in range(2)]
    assert_same(second, first)
    assert len(refused) == 1


class _Onlooker(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _looked_on(fast: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with _Onlooker():
        return fast(x)


class _Doubles(TorchFunctionMode):
    """Doubles what ReLU returns."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if "relu" in getattr(func, "__name__", "") else found


def _doubled(fast: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with _Doubles():
        return fast(x)


def _traced(fast: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.jit.trace(fast, (x,), check_trace=False)(x)


def _nested(fast: nn.Module) -> torch.Tensor:
    """A call that eager refuses too; returns the text of its error."""
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    try:
        fast(torch.nested.nested_tensor(rows))
    except RuntimeError as error:
        return torch.tensor([float(ord(letter)) for letter in str(error)])
    raise AssertionError("eager takes it by now")


def strangers(fast: nn.Module) -> dict[str, tuple[Any, str]]:
    """More calls that the program refuses."""
    x = torch.linspace(-2, 2, 12).reshape(4, 3)
    wide = {"bias": torch.ones(1, 5)}
    return {
        "dispatch mode": (lambda: _looked_on(fast, x), "dispatch mode"),
        "function mode": (lambda: _doubled(fast, x), "sees each function"),
        "trace": (lambda: _traced(fast, x), "torch.jit.trace"),
        "negated": (lambda: fast(torch._neg_view(x)), "negated"),
        "rank": (lambda: fast(x[0]), "2 dimensions"),
        "nested": (lambda: _nested(fast), "dimensions"),
        "parameter": (lambda: torch.func.functional_call(fast, wide, x), "bias"),
        **misfits(fast),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", list(strangers(nn.Identity())))
def test_a_call_that_does_not_fit_is_refused_after_calls_that_do(gemm: Made, kind: str) -> None:
    fast = fresh(gemm, [])
    run, word = strangers(fast)[kind]
    for _ in range(2):
        fast(torch.randn(4, 3))
    with pytest.warns(RuntimeWarning, match=word):
        mine = run()
    assert_same(mine, strangers(copy.deepcopy(gemm[0].model))[kind][0]())


def test_a_default_device_is_no_onlooker(gemm: Made) -> None:
    fast, x = fresh(gemm, []), torch.randn(4, 3)
    wanted = fast(x)
    with warnings.catch_warnings(), torch.device("cpu"):
        warnings.simplefilter("error")
        assert_same(fast(x), wanted)


def test_gradients_are_recorded_as_each_call_wants_them(gemm: Made) -> None:
    fast, x = fresh(gemm, []), torch.randn(4, 3)
    want = torch.relu(x @ fast.gemm.weight.t() + fast.bias).detach()
    for _ in range(2):
        assert fast(x).grad_fn is not None
        with torch.no_grad():
            assert fast(x).grad_fn is None
        with torch.inference_mode():
            assert fast(x).is_inference()
        fast.requires_grad_(False)
        assert not fast(x).requires_grad
        leaf = x.clone().requires_grad_()
        fast(leaf).sum().backward()
        assert leaf.grad is not None and fast.bias.grad is None
        fast.requires_grad_()
        assert_same(fast(x).detach(), want)


def test_other_versions_of_pytorch_run_the_guards_every_time(
    gemm: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_fw_tensor_guards", None)
    asked: list[str] = []
    fast, x = fresh(gemm, asked), torch.randn(4, 3)
    first, second = fast(x), fast(x)
    assert_same(second, first)
    assert len(asked) == 2


def test_a_tensor_given_twice_is_not_a_call_alike() -> None:
    a, b = torch.randn(3), torch.randn(3)
    like = guard._fw_likeness((a, b))
    assert like is not None
    assert like(b, a) and not like(a, a) and not like(a, None)
    assert not like(a, torch.randn(4)) and not like(a, torch.randn(6)[::2])
    assert not like(a, b.double()) and not like(a, b.to("meta")) and not like(a, nn.Parameter(b))


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((4, 3), (3, 1)),
        ((4, 3), (8, 1)),
        ((3, 4), (1, 3)),
        ((0, 5), (5, 1)),
        ((), ()),
        ((7,), (1,)),
    ],
)
def test_allocated_memory_has_the_strides_asked_for(
    quick: bool, shape: Any, strides: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not quick:
        monkeypatch.setattr(library, "_fw_empty_host", None)
    for dtype in (torch.float32, torch.bool, torch.float16, torch.int64):
        made = library._fw_memory(shape, strides, dtype, torch.device("cpu"))
        theirs = torch.empty_strided(shape, strides, dtype=dtype)
        assert (made.shape, made.stride(), made.dtype) == (shape, strides, dtype)
        assert made.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
        assert made.fill_(1).sum() == made.numel() and not made.requires_grad
    with torch.inference_mode():
        assert library._fw_memory(shape, strides, dtype, torch.device("cpu")).is_inference()


@pytest.mark.parametrize("current", [0, 1])
def test_memory_of_another_gpu_is_allocated_by_pytorchs_public_function(
    current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast function allocates on the current device only."""
    monkeypatch.setattr(library, "_fw_current_device", lambda: current)
    monkeypatch.setattr(library, "_fw_empty_cuda", lambda *args: ("short", *args))
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kwargs: ("long", kwargs["device"]))
    one = torch.device("cuda", 1)
    made: Any = library._fw_memory((2,), (1,), torch.float32, one)
    expected = ("short", (2,), (1,), torch.float32) if current == 1 else ("long", one)
    assert made == expected


def test_names_in_the_run_time_are_unique() -> None:
    """All its modules end up in one file."""
    names: Counter[str] = Counter()
    for part in (library, guard, call, operators, tensor_cores, host):
        for node in ast.parse(inspect.getsource(part)).body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    names[name] += 1
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(name)):
                    names[name] += 1
    assert [name for name, count in names.items() if count > 1] == []
    assert {"_fw_build", "_fw_recipe"} <= set(vars(cuda)), "the one module in place of `host`"


class Differ(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return b - 2 * a


class Both(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return b - 2 * a, b + a


class Second(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return b.exp()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), 3.0))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a * self.scale


@pytest.mark.parametrize(
    ("model", "as_given", "lone"),
    [
        (Differ(), True, True),
        (Both(), True, False),
        (Second(), None, True),
        (Scaled(), False, True),
    ],
)
def test_calls_alike_take_short_cuts(model: nn.Module, as_given: bool | None, lone: bool) -> None:
    """Steps that only hand values on are left out. Results are the module's."""
    given = tuple(torch.randn(5) for _ in inspect.signature(model.forward).parameters)
    fast = fusewright.optimize(model.eval(), given, modes=("eval",))
    (mode,) = fast.__dict__[ENGINE].modes
    assert as_given in (mode.as_given, None) and mode.lone == lone
    for _ in range(3):
        given = tuple(torch.randn(5) for _ in given)
        with torch.no_grad():
            torch.testing.assert_close(fast(*given), model(*given), rtol=1e-6, atol=1e-6)
    assert mode.fitted[False]
