"""Calls that a compiled program refuses, and the original module runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusewright.compile.owners import Modes
from tests.support.handmade import Case

Made = tuple[Case, Modes]


def no_program(*_: Any) -> None:
    """Stands for a compiler that makes no program for a new kind of call."""


def misfits(fast: nn.Module) -> dict[str, tuple[Any, str]]:
    """Calls that the program of `gemm_add_relu` refuses, and a word of the reason."""
    x = torch.linspace(-2, 2, 12).reshape(4, 3)
    return {
        "dtype": (lambda: fast.double()(x.double()), "float64"),
        "strides": (lambda: fast(x.reshape(3, 4).t()), "strides"),
        "autocast": (lambda: _autocast(fast, x), "autocast is torch.bfloat16"),
        "subclass": (lambda: fast(_Tagged(x)), "_Tagged"),
        "hook": (lambda: _hooked(fast, x), "hooks of gemm"),
        "attribute": (lambda: _altered(fast, x), "gemm.in_features"),
        "one submodule": (lambda: _half_eval(fast, x), "gemm.training"),
        "vmap": (lambda: torch.func.vmap(fast)(x[:, None]), "torch.func"),
        "sparse": (lambda: fast(x.to_sparse()), "torch.sparse_coo"),
        "dual": (lambda: _dual(fast, x), "forward-mode"),
    }


class _Tagged(torch.Tensor):
    @staticmethod
    def __new__(cls, x: torch.Tensor) -> _Tagged:
        return torch.Tensor._make_subclass(cls, x)


def _autocast(fast: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return fast(x)


def _hooked(fast: nn.Module, x: torch.Tensor) -> torch.Tensor:
    fast.gemm.register_forward_hook(lambda *args: args[-1] * 0)
    return fast(x)


def _altered(fast: nn.Module, x: torch.Tensor) -> torch.Tensor:
    fast.gemm.in_features = 4
    return fast(x)


def _half_eval(fast: nn.Module, x: torch.Tensor) -> torch.Tensor:
    fast.gemm.eval()
    return fast(x)


def _dual(fast: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        made = fast(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = torch.autograd.forward_ad.unpack_dual(made).tangent
        assert tangent is not None
        return made
