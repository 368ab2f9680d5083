"""A model of many kinds of state, and changes of each between two calls."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SOURCE = """
import torch
from torch import nn

class Scale(nn.Module):
    def forward(self, x):
        return x * 2

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.ReLU()
        self.same = nn.Identity()
        self.line = nn.Sequential(nn.Hardtanh(), nn.Softplus())
        self.list = nn.ModuleList([Scale()])
        self.lin = nn.Linear(3, 3, bias=False)
        self.register_buffer("shift", None)
        self.spare = nn.Parameter(torch.ones(3))
        self.scales = [1.0, 2.0]
        self.table = {"k": {"j": 3.0}}
        self.odd = {2, 4}
        self.act = torch.tanh
        self.dtype = torch.float32

    def forward(self, x):
        x = self.line(self.same(self.a(x)))
        for each in self.list:
            x = each(x)
        if self.shift is not None:
            x = x + self.shift
        if self.spare is None:
            x = x - 100
        x = self.lin(x) * self.scales[1] + self.table["k"]["j"] + len(self.odd)
        return self.act(x).to(self.dtype) + torch.full((1,), 0.25)
"""


def made() -> nn.Module:
    """The model alone, as a user has it."""
    place = sys.modules.setdefault("a_users_file", types.ModuleType("a_users_file"))
    exec(SOURCE, vars(place))
    torch.manual_seed(0)
    model: nn.Module = place.Model()
    return model


def set_to(path: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return change


def patch_forward(model: nn.Module) -> None:
    model.a.forward = types.MethodType(lambda self, x: x * 7, model.a)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "another activation": set_to("a", nn.SiLU()),
    "a linear for an identity": set_to("same", nn.Linear(3, 3)),
    "an identity for an activation": set_to("line.0", nn.Identity()),
    "Sequential.append": lambda m: m.line.append(nn.Sigmoid()),
    "ModuleList.append": lambda m: m.list.append(nn.Tanh()),
    "ModuleList item": lambda m: m.list.__setitem__(0, nn.Tanh()),
    "a bias": set_to("lin.bias", nn.Parameter(torch.ones(3))),
    "a buffer": set_to("shift", torch.full((3,), 2.0)),
    "a parameter that is None": set_to("spare", None),
    "a patched forward": patch_forward,
    "its class": lambda m: setattr(m.a, "__class__", nn.SiLU),
    "a list's item": lambda m: m.scales.__setitem__(1, 9.0),
    "a list": set_to("scales", [1.0, 3.0]),
    "a dict inside a dict": lambda m: m.table["k"].update(j=0.0),
    "a set": lambda m: m.odd.add(9),
    "a function": set_to("act", torch.sigmoid),
    "a dtype": set_to("dtype", torch.bfloat16),
    "a number inside": set_to("line.1.beta", 3.0),
    "a number as a tensor": set_to("line.1.beta", torch.tensor(3.0)),
}


def lambdas() -> list[Callable[[torch.Tensor], torch.Tensor]]:
    return [lambda x: x * 2, lambda x: x * 3]


def is_fused(model: nn.Module, x: torch.Tensor) -> bool:
    found = model(x.clone().requires_grad_()).grad_fn
    return type(found).__name__ == "_FwFunctionBackward"


def eager_result(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    kind = type(model).__mro__[1] if type(model).__name__ == "ModelNew" else type(model)
    kind = getattr(kind, "_fw_original", kind)
    result: torch.Tensor = kind.forward(model, x)
    return result
