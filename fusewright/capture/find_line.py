"""The user's line behind something that a graph cannot hold, found by running forward again.

A traced graph does not say which line an operator comes from. Recording that in every capture would
cost more than this second run after a failed one.
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
from fusewright.capture.call import ModelCall
from fusewright.capture.source_location import SourceLocation, innermost, of_error


def culprit(model: nn.Module, call: ModelCall) -> SourceLocation | None:
    """The line that calls the first operator whose result, or generator, a trace cannot hold."""
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
    except Exception as error:  # we look for the line that raises it
        return watch.place or of_error(error)
    return watch.place


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stores the line of the first such operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: SourceLocation | None = None

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


def _callers() -> Iterator[SourceLocation]:
    """The frames below `culprit`; the frames above it are not the model's."""
    frame = sys._getframe(1)
    while frame.f_code is not culprit.__code__:
        yield SourceLocation(frame.f_code.co_filename, frame.f_lineno)
        assert frame.f_back is not None
        frame = frame.f_back
