"""Entries as built-in functions of Python: the same results as by ctypes, and errors with a
message."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from pathlib import Path
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

import fusewright
from benchmarks.loop_kernels import access, kernel
from fusewright.ir.graph import Dim
from fusewright.ir.loop import Apply, Load, Store
from fusewright.runtime import library
from fusewright.target.target import Target
from tests.support import loop_runs


def built() -> tuple[ctypes.CDLL, Any]:
    """y = exp(x) of s0 elements: its library, and its entry as a built-in function."""
    body = [
        Load("x", "float32", access("x", 1)),
        Apply("e", "float32", "exp", ("x",)),
        Store("e", "float32", access("y", 1)),
    ]
    loop = kernel("powers", [Dim(1, ("s0",))], [], {"x": "float32"}, {"y": "float32"}, body)
    opened, _ = loop_runs.build(loop, Target.host(), {"s0": 1000})
    return opened, library._fw_builtin(opened, "powers")


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_the_same_as_by_ctypes(n: int) -> None:
    opened, called = built()
    assert isinstance(called, BuiltinFunctionType) and called.__name__ == "powers"
    x, ours, theirs = torch.randn(n), torch.empty(n), torch.empty(n)
    pointers = [ctypes.c_void_p, ctypes.c_void_p]
    opened.powers.argtypes = [*pointers, ctypes.c_int64, *pointers[:1], ctypes.c_int, *pointers[:1]]
    assert opened.powers(x.data_ptr(), theirs.data_ptr(), n, None, 1, None) == 0
    assert called(x.data_ptr(), ours.data_ptr(), n, None, 1, None) == 0
    assert torch.equal(ours, theirs)
    assert called(x, ours.fill_(-1), n, None, 1, None) == 0 and torch.equal(ours, theirs)
    assert called(x, None, n, None, 1, None) == 0  # an unwanted output


@pytest.mark.parametrize(
    "given",
    [(), (0, 0, 0, None, 1), (0, 0, 0, None, 1, None, 0), (0, 0, "0", None, 1, None), (0.5,) * 6],
)
def test_a_wrong_call_is_refused(given: tuple[Any, ...]) -> None:
    _, called = built()
    with pytest.raises((TypeError, AttributeError)):  # a tensor has a `data_ptr`
        called(*given)
    x, y = torch.zeros(3), torch.zeros(3)
    assert called(x.data_ptr(), y.data_ptr(), 3, None, 1, None) == 0
    assert y.tolist() == [1.0, 1.0, 1.0]


def test_an_integer_too_large_is_refused() -> None:
    _, called = built()
    with pytest.raises(OverflowError):
        called(None, None, 2**70, None, 1, None)


def test_calls_keep_no_references() -> None:
    """Whether they succeed or fail, and wherever the wrong argument is."""
    _, called = built()
    x, y, n, wrong = torch.zeros(3), torch.zeros(3), 3, SimpleNamespace(data_ptr=lambda: "place")
    objects = (x, y, n, wrong, wrong.data_ptr, called, type(wrong), torch.Tensor, None)
    before = [sys.getrefcount(each) for each in objects]
    for _ in range(100):
        called(x, y, n, None, 1, None)
        for at in range(6):
            given: list[Any] = [x, y, n, None, 1, None]
            given[at] = wrong
            with pytest.raises(TypeError):
                called(*given)
        with pytest.raises(TypeError):
            called(x, y)
        del given
    gc.collect()
    after = [sys.getrefcount(each) for each in objects]
    assert max(now - was for was, now in zip(before, after, strict=True)) < 50


def test_a_function_outlives_its_module() -> None:
    """An emitted file has its own copy of the module. Python reads a function's record as long as
    the function exists, even while both are deleted."""
    opened, _ = built()
    copied: dict[str, Any] = {"__name__": "copied"}
    exec(Path(library.__file__).read_text(), copied)
    record: Any = copied["_FwMethod"]
    records = []

    class Seen(record):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            records.append(weakref.ref(self))

    copied["_FwMethod"] = Seen
    called = copied["_fw_builtin"](opened, "powers")
    copied.clear()
    gc.collect()
    assert [each() for each in records] != [None], "the record was freed"
    assert called.__name__ == "powers"
    del called
    gc.collect()
    assert records[0]() is not None


def test_other_threads_run_meanwhile() -> None:
    """The kernel runs without Python's lock: two threads call at once."""
    _, called = built()
    inputs = [torch.randn(100_000) for _ in range(2)]
    results = [torch.empty(100_000) for _ in range(2)]

    def work(at: int) -> None:
        for _ in range(20):
            called(inputs[at].data_ptr(), results[at].data_ptr(), 100_000, None, 1, None)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for x, y in zip(inputs, results, strict=True):
        torch.testing.assert_close(y, x.exp(), rtol=3e-7, atol=0)


def test_modules_call_them() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x).sum()

    x = torch.randn(300)
    fast = fusewright.optimize(Model().eval(), (x,), modes=("eval",))
    torch.testing.assert_close(fast(x), x.exp().sum())
    (mode,) = fast.__dict__["_fw_engine"].modes
    kernels = mode.inference.__globals__["_fw_kernels"]
    entries = [vars(kernels)[name] for name in kernels._entries]
    assert entries and all(isinstance(each, BuiltinFunctionType) for each in entries)
