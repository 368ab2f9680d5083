"""Entry points say their names to the profiler, those of several precisions too."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fusewright.bench.trace import annotated, owner_of


def test_entries_are_named_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(x: int) -> int:
        return x + 1

    def exact(x: int) -> int:
        return x * 3

    kernels = SimpleNamespace(_entries={"loop": (), "product": ()}, loop=plain, product={3: exact})
    home = ModuleType("home_of_entries")
    monkeypatch.setattr(home, "_fw_kernels", kernels, raising=False)
    monkeypatch.setitem(sys.modules, home.__name__, home)
    model = type("Model", (nn.Module,), {"__module__": home.__name__})()
    with annotated(model), profile(activities=[ProfilerActivity.CPU]) as seen:
        assert (kernels.loop(1), kernels.product[3](5)) == (2, 15)
    names = {each.key for each in seen.key_averages()}
    assert {owner_of("loop", ()), owner_of("product", ())} <= names
    assert kernels.loop is plain and kernels.product == {3: exact}
