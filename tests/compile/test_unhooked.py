"""Calls by way of Dynamo notice hooks, although modules without hooks are remembered."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.compile.unhooked import Unhooked
from fusewright.runtime import altered


class Settings:
    scale = 2.0


class Model(nn.Module):
    """It reads an object, so its calls go through Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
        self.settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.settings.scale
        return x


def add_ten(_: nn.Module, __: object, result: Tensor) -> Tensor:
    return result + 10


def hook_a_layer(model: Model) -> None:
    model.layers[0].register_forward_hook(add_ten)


def hook_before_an_inner_layer(model: Model) -> None:
    model.layers[1][0].register_forward_pre_hook(lambda _, args: (args[0] + 1,))  # type: ignore[index]


def swap_in_a_hooked_layer(model: Model) -> None:
    other = copy.deepcopy(model.layers[0])
    other.register_forward_hook(add_ten)
    model.layers[0] = other


def replace_the_table(model: Model) -> None:
    model.layers[0]._forward_hooks = OrderedDict({0: add_ten})


def hook_a_new_child(model: Model) -> None:
    extra = nn.Identity()
    extra.register_forward_hook(add_ten)
    model.layers[1].append(extra)  # type: ignore[operator]


def hook_the_model_itself(model: Model) -> None:
    model.register_forward_hook(add_ten)


CHANGES = [
    hook_a_layer,
    hook_before_an_inner_layer,
    swap_in_a_hooked_layer,
    replace_the_table,
    hook_a_new_child,
    hook_the_model_itself,
]


@pytest.mark.parametrize("change", CHANGES)
def test_hooks_that_come_after_calls(change: Callable[[Model], None]) -> None:
    model, x = Model(), torch.randn(3, 4)
    fast = fusewright.optimize(model, x)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
    change(model)
    if change is hook_the_model_itself:
        change(fast)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(fast(x), model(x))


def test_a_hook_of_all_modules() -> None:
    model, x = Model(), torch.randn(3, 4)
    fast = fusewright.optimize(model, x)
    fast(x)
    seen: list[str] = []
    hook = lambda module, args, result: seen.append(type(module).__name__)  # noqa: E731
    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        with pytest.warns(RuntimeWarning, match="hooks of all modules must see each call"):
            fast(x)
    finally:
        handle.remove()
    assert seen.count("Linear") == 2


def test_a_module_without_hooks_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[nn.Module] = []
    real = altered._fw_hooked

    def counted(module: nn.Module) -> str | None:
        walks.append(module)
        return real(module)

    monkeypatch.setattr(altered, "_fw_hooked", counted)
    model, unhooked = Model(), Unhooked()
    assert [unhooked.reason(model) for _ in range(5)] == [None] * 5
    assert walks == [model]
    handle = model.layers[0].register_forward_hook(add_ten)
    assert "hooks of layers.0 must see its calls" in str(unhooked.reason(model))
    handle.remove()
    assert [unhooked.reason(model) for _ in range(3)] == [None] * 3
    assert walks == [model] * 3
    assert unhooked.reason(Model()) is None  # another module is another question
    assert len(walks) == 4
