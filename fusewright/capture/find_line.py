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

from fusewright.capture.attributes import copied, fake_buffers, restored
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
        with copied(model), restored(model) as before, torch.no_grad(), fake_mode:
            fake_buffers(fake_mode, before)
            with watch:
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


class _Overwriting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stores the lines that save tensors for backward, and those that change tensors in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved: list[tuple[torch.Tensor, int, int, SourceLocation | None]] = []
        self.written: list[tuple[int, SourceLocation | None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for declared, given in zip(func._schema.arguments, args, strict=False):
            changes = declared.alias_info is not None and declared.alias_info.is_write
            if changes and isinstance(given, torch.Tensor):
                self.written.append((_memory(given), innermost(reversed([*_callers()]))))
        return func(*args, **(kwargs or {}))

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        place = innermost(reversed([*_callers()]))
        self.saved.append((tensor, tensor._version, len(self.written), place))
        return tensor

    def lines(self) -> tuple[SourceLocation | None, SourceLocation | None]:
        for tensor, version, first, place in self.saved:
            if tensor._version != version:
                later = (at for memory, at in self.written[first:] if memory == _memory(tensor))
                return next(later, None), place
        return None, None


def overwriting(
    model: nn.Module, call: ModelCall
) -> tuple[SourceLocation | None, SourceLocation | None]:
    """The line that changes in place a tensor that backward needs, and the line that saved it."""
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    watch = _Overwriting()
    hooks = torch.autograd.graph.saved_tensors_hooks(watch.save, lambda tensor: tensor)
    with copied(model), restored(model) as before, torch.enable_grad(), fake_mode:
        fake_buffers(fake_mode, before)
        leaves = [
            _result_like(fake_mode.from_tensor(each)) if isinstance(each, torch.Tensor) else each
            for each in call.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        try:
            with watch, hooks:
                model(*args, **kwargs)
        except Exception as error:
            return of_error(error), None
        return watch.lines()


def _result_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with a gradient that may be changed in place, as a result of an operator may."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.detach().requires_grad_(True).clone()


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_unknown(value: object) -> bool:
    symbolic = isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    return symbolic and bool(free_unbacked_symbols(value))


def _callers() -> Iterator[SourceLocation]:
    """The frames below ours; the frames above are not the model's."""
    frame = sys._getframe(1)
    while frame.f_code not in (culprit.__code__, overwriting.__code__):
        yield SourceLocation(frame.f_code.co_filename, frame.f_lineno)
        assert frame.f_back is not None
        frame = frame.f_back
