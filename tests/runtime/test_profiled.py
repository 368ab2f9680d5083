"""PyTorch's profiler shows our kernels under their own names, on a CPU as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fusewright.compile.engine import engine_of
from fusewright.runtime import library
from tests.support.composed import ROUTES, ours, train


def _names(run: Callable[[], Any]) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    return {each.key for each in seen.key_averages() if each.key.startswith("custom_")}


@pytest.mark.parametrize("route", ROUTES)
def test_kernels_have_names(route: str) -> None:
    torch._dynamo.reset()
    model, run = ours(route)
    train(model, run)
    found = _names(lambda: train(model, run))
    assert any("gelu" in name or "erf" in name for name in found)
    assert len(found) >= 4, "forward and backward"
    torch._dynamo.reset()


def test_entry_points_come_back() -> None:
    model, run = ours("programs")
    wanted = train(model, run)
    engine = engine_of(model)
    assert engine is not None
    kernels: Any = next(each for each in engine.modes if each.training).inference.__globals__
    held = vars(kernels["_fw_kernels"])
    before = {name: held[name] for name in held["_entries"]}
    _names(lambda: train(model, run))
    assert any(isinstance(held[name], library._FwNamed) for name in before)
    torch.testing.assert_close(train(model, run), wanted)
    used = [name for name in before if not isinstance(held[name], library._FwNamed)]
    assert used and all(held[name] is before[name] for name in used)
