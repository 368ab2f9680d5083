"""Whether a call works in eager mode at all: if not, there is nothing to optimize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusewright import debug
from fusewright.capture.generators import restored_generators
from fusewright.capture.hooks import unhooked
from fusewright.capture.private import real_copy
from fusewright.capture.reachable import Reachable
from fusewright.capture.real_call import real_call


def fails_in_eager(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether the model raises an error for these arguments, with gradients if the caller has them
    enabled. It is called on copies."""
    if Reachable(model).holds_state():
        return False
    try:
        call = real_copy(model, args, kwargs or {})
    except Exception as error:  # of the user's own classes
        debug.log(1, "%s is not tried in eager mode: %s", type(model).__name__, error)
        return False
    if call is None:
        return False
    twin, given, named = call
    gradients = torch.set_grad_enabled(torch.is_grad_enabled())  # which `real_call` enables
    with real_call(), gradients, restored_generators(), unhooked(twin):
        try:
            twin(*given, **named)
        except torch.OutOfMemoryError:
            return False
        except Exception as error:
            debug.log(1, "%s fails in eager mode: %s", type(model).__name__, error)
            return True
    return False


def always_fails_in_eager(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bool:
    """The same with gradients and without. Some operators are for inference alone."""
    for wanted in (True, False):
        with torch.set_grad_enabled(wanted):
            if not fails_in_eager(model, args, kwargs):
                return False
    return True
