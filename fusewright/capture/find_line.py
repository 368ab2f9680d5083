"""The user's line behind something that no graph can hold, found by running forward once more.

A traced graph does not say which line an operator comes from, and recording that at every capture
would cost more than this does where one fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode

from fusewright.capture.attributes import kept
from fusewright.capture.call import Call
from fusewright.capture.source_location import Place, innermost, of_error


def culprit(model: nn.Module, call: Call) -> Place | None:
    """Where the first operator is called whose result or argument is not known to a trace."""
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    leaves = [
        fake_mode.from_tensor(each) if isinstance(each, torch.Tensor) else each
        for each in call.leaves
    ]
    args, kwargs = pytree.tree_unflatten(leaves, call.spec)
    watch = _Watch()
    try:
        with torch.no_grad(), fake_mode, watch, kept(model):
            model(*args, **kwargs)
    except Exception as error:  # the line that raises it is what we came for
        return watch.place or of_error(error)
    return watch.place


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the place of the first operator that matters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: Place | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = pytree.tree_leaves((args, kwargs))
        drawn = any(isinstance(each, torch.Generator) for each in given)
        unknown = any(map(_is_unknown, pytree.tree_leaves(result)))
        if self.place is None and (drawn or unknown):
            self.place = innermost(reversed([*_callers()]))
        return result


def _is_unknown(value: object) -> bool:
    symbolic = isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    return symbolic and bool(free_unbacked_symbols(value))


def _callers() -> Iterator[Place]:
    """The frames below `culprit`: what lies above it did not write the model."""
    frame = sys._getframe(1)
    while frame.f_code is not culprit.__code__:
        yield Place(frame.f_code.co_filename, frame.f_lineno)
        assert frame.f_back is not None
        frame = frame.f_back
