"""Globals of a file that the model under test is not in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

SCALE = 2.0
SETTINGS: Any = SimpleNamespace(scale=2.0)
NAMES: dict[str, float] = {}


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


def configured(x: Tensor) -> Tensor:
    return x * SETTINGS.scale * getattr(SETTINGS, "extra", 1.0) * NAMES.get("extra", 1.0)


def activation(x: Tensor) -> Tensor:
    return x.relu()


def activated(x: Tensor) -> Tensor:
    return activation(x)
