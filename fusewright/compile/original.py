"""The model behind an optimized module: its own class, with the same state."""

from __future__ import annotations

from torch import nn


def original(module: nn.Module) -> nn.Module:
    """The module with its original class and the same object dictionary."""
    plain = object.__new__(original_class(module))
    object.__setattr__(plain, "__dict__", module.__dict__)
    return plain


def original_class(module: nn.Module) -> type[nn.Module]:
    kind: type[nn.Module] = getattr(type(module), "_fw_original", type(module))
    return kind
