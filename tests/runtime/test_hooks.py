"""Hooks that are added, replaced and removed run as in eager mode."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as every_module

import fusewright
from tests.support.altered_models import eager_result, is_fused
from tests.support.tensors import assert_same

HOOKS: dict[str, Callable[[nn.Module, Callable[..., Any]], Any]] = {
    "forward": lambda m, note: m.a.register_forward_hook(note),
    "pre": lambda m, note: m.a.register_forward_pre_hook(note),
    "backward": lambda m, note: m.lin.register_full_backward_hook(note),
    "backward pre": lambda m, note: m.lin.register_full_backward_pre_hook(note),
    "global forward": lambda m, note: every_module.register_module_forward_hook(note),
    "global pre": lambda m, note: every_module.register_module_forward_pre_hook(note),
    "global backward": lambda m, note: every_module.register_module_full_backward_hook(note),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("where", ["program", "file"])
def test_hooks_of_submodules_run_as_in_eager(
    program: nn.Module, file: Callable[[], nn.Module], kind: str, where: str
) -> None:
    fast, x = copy.deepcopy(program) if where == "program" else file(), torch.randn(4, 3)
    assert is_fused(fast, x)
    seen: list[str] = []
    handle = HOOKS[kind](fast, lambda module, *_: seen.append(type(module).__name__))
    named = "all modules" if "global" in kind else "lin" if "backward" in kind else "hooks of a "
    try:
        with pytest.warns(RuntimeWarning, match=named):
            fast(x.clone().requires_grad_()).sum().backward()
        once, wanted = len(seen), 1 if "global" not in kind else 8
        assert once >= wanted
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fast(x.clone().requires_grad_()).sum().backward()
        assert len(seen) == 2 * once
    finally:
        handle.remove()
    assert is_fused(fast, x) and len(seen) == 2 * once


def test_one_hook_replaced_by_another(program: nn.Module) -> None:
    fast, x = copy.deepcopy(program), torch.randn(4, 3)
    first = fast.a.register_forward_hook(lambda *args: args[-1] * 2)
    with pytest.warns(RuntimeWarning, match="hooks of a "):
        assert_same(fast(x), eager_result(fast, x))
    first.remove()
    fast.a.register_forward_hook(lambda *args: args[-1] * 0)
    assert_same(fast(x), eager_result(fast, x))
    fast.a._forward_hooks = OrderedDict()  # as code that clears all hooks does
    assert is_fused(fast, x)
    fast.a.register_forward_hook(lambda *args: args[-1] * 3)
    assert_same(fast(x), eager_result(fast, x))


def test_a_capture_neither_runs_hooks_nor_contains_them() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(4, 3)
    plain = model(x)
    seen: list[type] = []
    handles = [
        model[1].register_forward_hook(lambda module, args, out: seen.append(type(out))),
        model[1].register_forward_hook(lambda module, args, out: out * 2),
        model.register_forward_hook(lambda module, args, out: out + 1),
        every_module.register_module_forward_pre_hook(lambda m, args: seen.append(type(args[0]))),
    ]
    try:
        fast = fusewright.optimize(model, x, modes=("train",))
        assert seen == [] and len(model[1]._forward_hooks) == 2
        with pytest.warns(RuntimeWarning, match="hooks of all modules"):
            assert_same(fast(x), 2 * plain + 1)
        assert set(seen) == {torch.Tensor}
    finally:
        handles.pop().remove()
    with pytest.warns(RuntimeWarning, match="hooks of 1 "):
        assert_same(fast(x), 2 * plain + 1)
    handles[0].remove(), handles[1].remove()
    assert_same(fast(x), plain + 1)
    handles[2].remove()
    assert is_fused(fast, x)
