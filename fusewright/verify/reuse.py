"""Large models are initialised once: a host needs seconds for each gigabyte of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn

_LARGE_BYTES = 1 << 27


def reusing(make: Callable[[], nn.Module], device: torch.device) -> Callable[[], nn.Module]:
    """Makes models on the device; later large ones are copies of the first as it was made."""
    kept: list[nn.Module] = []

    def made() -> nn.Module:
        if kept:
            return copy.deepcopy(kept[0])
        model = make().to(device)
        if sum(each.nbytes for each in model.parameters()) >= _LARGE_BYTES:
            with suppress(RuntimeError, TypeError):  # not every model can be copied
                kept.append(copy.deepcopy(model))
        return model

    return made
