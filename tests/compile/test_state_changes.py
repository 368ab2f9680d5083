"""Random Python state that forward reads, changed at random between calls: eager is the truth."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusewright
from tests.support.python_state import CIRCUMSTANCES, STATES, changing


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if "state_" in name:
            del sys.modules[name]
    torch._dynamo.reset()


@contextlib.contextmanager
def _under(circumstances: set[str]) -> Iterator[None]:
    """Run calls in these circumstances."""
    with contextlib.ExitStack() as stack:
        if "no_grad" in circumstances:
            stack.enter_context(torch.no_grad())
        if "autocast" in circumstances:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        if "float64" in circumstances:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        if "deterministic" in circumstances:
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True)
        yield


def _result(model: Any, circumstances: set[str]) -> list[Any]:
    """The output and the gradients of one call."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float32).reshape(3, 4)
    x.requires_grad_("detached" not in circumstances)
    with _under(circumstances):
        y = model(x)
    needed = [each for each in (x, model.weight) if each.requires_grad]
    counts = [value for value in vars(model).values() if type(value) is int]
    return [y, *(torch.autograd.grad(y.sum(), needed) if y.requires_grad else ()), *counts]


@pytest.mark.filterwarnings("ignore:the original forward runs")
@pytest.mark.sample(21)
@pytest.mark.parametrize("seed", range(500))
def test_state_changes(seed: int, tmp_path: Path) -> None:
    case = changing(seed, tmp_path)
    plain, model, done = case.model(), case.model(), []
    fast = fusewright.optimize(model, torch.randn(3, 4), modes=("train", "eval"))
    circumstances: set[str] = set()
    for change in ("", *case.changes):
        if change in CIRCUMSTANCES:
            circumstances ^= {change}
        elif change:
            case.change(change, plain)
            case.change(change, fast)
        done.append(change)
        for _ in range(2):
            wanted, found = _result(plain, circumstances), _result(fast, circumstances)
            words = f"{case.names} after {done}: {fast.__dict__['_fw_engine'].reason!r}"
            try:
                torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
            except AssertionError as error:
                raise AssertionError(f"{words}\n{case.text}") from error


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [name for name, each in STATES.items() if each.ours])
def test_states_that_our_own_guards_compare(name: str, tmp_path: Path) -> None:
    seed = next(n for n in range(0, 10_000, 2) if changing(n, tmp_path).names[0] == name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = fusewright.optimize(changing(seed, tmp_path).model(), torch.randn(3, 4))
    assert fast.__dict__["_fw_engine"].modes, "our own program runs"
