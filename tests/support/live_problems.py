"""A live module as a problem, for tests that need no file."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn

from fusewright.errors import ProblemError
from fusewright.problem.inputs import is_overlapping
from fusewright.problem.load import Arguments, Problem
from fusewright.problem.nested import map_leaves


def problem_from_module(module: nn.Module, example_inputs: object) -> Problem:
    """The module with its examples as inputs; at each call their floating values are permuted."""
    inputs = (
        tuple(example_inputs) if isinstance(example_inputs, list | tuple) else (example_inputs,)
    )

    def no_constructor() -> Arguments:
        raise ProblemError("the constructor's arguments of a live module are not known")

    try:
        source = inspect.getsource(type(module))
    except (OSError, TypeError):
        source = ""
    return Problem(
        name=type(module).__name__,
        path=None,
        source=source,
        make_model=lambda: copy.deepcopy(module),
        make_inputs=lambda: tuple(map_leaves(_permuted, each) for each in inputs),
        make_init=no_constructor,
    )


def _permuted(leaf: object) -> object:
    """A floating tensor with its values rolled along, in the same layout."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    if leaf.numel() < 2 or is_overlapping(leaf):
        return leaf.detach().requires_grad_(leaf.requires_grad)
    shift = int(torch.randint(1, leaf.numel(), ()))
    moved = torch.empty_strided(
        leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
    ).copy_(leaf.detach().reshape(-1).roll(shift).reshape(leaf.shape))
    return moved.requires_grad_(leaf.requires_grad)
