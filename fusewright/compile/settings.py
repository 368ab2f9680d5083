"""What the user asked of `optimize`, checked before anything is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fusewright.compile.pipeline import MODES
from fusewright.errors import ProblemError


class Absent:
    """Stands for an argument that was not given."""


def example_arguments(inputs: Any, kwargs: Any) -> tuple[Any, ...]:
    """The positional arguments of the example call."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        how = "pass several inputs as one tuple: optimize(model, (a, b))"
        raise ProblemError(f"example_kwargs is of type {type(kwargs).__name__}; {how}")
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def refuse_other_settings(model: Any, example_inputs: Any, modes: Any) -> None:
    if not isinstance(model, nn.Module):
        how = "for a function, leave the inputs out: optimize(function)"
        raise ProblemError(f"optimize takes a torch.nn.Module, not {type(model).__name__}; {how}")
    refuse_torchscript(model)
    if example_inputs is Absent:
        how = "optimize(model, inputs), or optimize(model, (a, b))"
        raise ProblemError(f"optimize needs an example of the model's inputs: {how}")
    if any(is_lazy(each) for each in (*model.parameters(), *model.buffers())):
        how = "call the model once first, which gives them their shapes"
        raise ProblemError(f"{type(model).__name__} has lazy layers without shapes; {how}")
    known = isinstance(modes, Sequence) and not isinstance(modes, str) and bool(modes)
    if not known or not set(modes) <= set(MODES):
        raise ProblemError(f'modes is {modes!r}; it is a tuple of "train", "eval" or both')


def refuse_torchscript(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        how = "optimize the module that torch.jit was given"
        raise ProblemError(f"{model.original_name} is a TorchScript module; {how}")
