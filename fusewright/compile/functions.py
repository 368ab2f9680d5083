"""Functions with our kernels. They stand on torch.compile, which guards all that they read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fusewright.compile.backend import backend
from fusewright.compile.replayed import wants_replays
from fusewright.errors import ProblemError


def optimized_function(function: Any, *, tune: bool, mode: str) -> Callable[..., Any]:
    """The function, compiled at its first call."""
    if isinstance(function, type) or not callable(function):
        kind = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
        how = "it takes a torch.nn.Module with an example of its inputs, or a function"
        raise ProblemError(f"what optimize was given is {kind}; {how}")
    wants_replays(mode)
    ours = functools.partial(backend, mode=mode, options={"tune": tune})
    compiled: Callable[..., Any] = torch.compile(function, backend=ours)
    return compiled
