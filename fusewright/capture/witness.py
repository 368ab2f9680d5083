"""One real call of a model in eager mode, as a witness of what a trace says.

A trace trusts PyTorch's shape functions and follows tensors alone. So the model first runs once, on
copies of its tensors and of the example: forward, then backward with ones. What that call returned,
differentiated, wrote and drew is compared with the program. The generators are left as they were.

Values are not compared, so dropout needs no care. If the model cannot be copied, if the call fails,
or if there is too little memory, there is no witness.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.overrides import TorchFunctionMode

from fusewright import debug
from fusewright.capture.call import ModelCall, held_tensors
from fusewright.capture.generators import gpu_generators, watched_generators
from fusewright.capture.memory import has_room
from fusewright.capture.private import real_copy
from fusewright.capture.reachable import Reachable
from fusewright.capture.real_call import real_call
from fusewright.capture.source_location import SourceLocation, innermost
from fusewright.capture.tree import UnwritableError, tree_text
from fusewright.errors import LeftToEagerError, UnguardedError

Key = tuple[str, str]  # the kind and path of a binding


@dataclass(frozen=True)
class Returned:
    """One tensor of the result. `copied` are the strides that a copy of it has."""

    device: str  # its type
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    copied: tuple[int, ...]
    differentiable: bool


@dataclass(frozen=True)
class Witness:
    """What one call did.

    outputs: the tensors of its result, in order. followed: the tensors that required gradients.
    reached: those of them that got one; None if backward failed. wanted: those that require
    gradients in the example, too. written: the tensors that it wrote into or replaced. drew:
    random numbers came from PyTorch's generators. A tensor with several names goes by the first;
    `names` gives that for the others.
    """

    outputs: tuple[Returned, ...]
    followed: frozenset[Key]
    reached: frozenset[Key] | None
    wanted: frozenset[Key]
    written: frozenset[Key]
    drew: bool
    names: Mapping[Key, Key]

    def first_name(self, kind: str, path: str) -> Key:
        return self.names.get((kind, path), (kind, path))


def witness(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Witness | None:
    """Call the model in the mode that it is in, without hooks of the user."""
    held = tensors_of(model, ModelCall.of(args, kwargs)).values()
    if Reachable(model).holds_state():
        debug.log(1, "no real call of %s: it may change others", type(model).__name__)
        return None
    if not has_room(held):
        debug.log(1, "no real call of %s: there is too little memory", type(model).__name__)
        return None
    for every in (True, False):
        try:
            with real_call(), torch.enable_grad():
                return _seen(model, args, kwargs, every)
        except (LeftToEagerError, UnguardedError):
            raise
        except Exception as error:  # of the model, of a copy, or for want of memory
            debug.log(1, "no real call of %s: %s", type(model).__name__, error)
            if isinstance(error, torch.OutOfMemoryError):
                break
    _free_memory()
    return None


def _free_memory() -> None:
    if gpu_generators():
        torch.cuda.empty_cache()


def _seen(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], every: bool
) -> Witness | None:
    """The witness, with gradients for every tensor that can have one, or those that need one."""
    copies = real_copy(model, args, kwargs)
    if copies is None:
        debug.log(1, "no real call of %s: a function holds it", type(model).__name__)
        return None
    copy, call = copies[0], ModelCall.of(*copies[1:])
    before = tensors_of(model, ModelCall.of(args, kwargs))
    held = tensors_of(copy, call)
    wanted = frozenset(key for key, each in before.items() if each.requires_grad)
    versions = {key: (each, each._version) for key, each in held.items()}
    if every:
        for (kind, _), each in held.items():
            floating = each.is_floating_point() or each.is_complex()
            if kind != "buffer" and each.is_leaf and floating:
                each.requires_grad_()
    given, named = pytree.tree_unflatten(list(call.leaves), call.spec)
    flat: list[Any] = []
    with watched_generators() as generators:
        with _Layouts(), contextlib.suppress(UnwritableError):
            tree_text(copy(*given, **named), flat, {})
        drew = generators.drew()
    results = [each for each in flat if isinstance(each, torch.Tensor)]
    now = tensors_of(copy, call)
    written = frozenset(
        key
        for key, (each, version) in versions.items()
        if now.get(key) is not each or each._version != version
    )
    leaves = {key: each for key, each in held.items() if each.requires_grad and each.is_leaf}
    reached = _reached(results, leaves)
    outputs = tuple(map(_returned, results))
    return Witness(outputs, frozenset(leaves), reached, wanted, written, drew, _names(model))


def tensors_of(model: nn.Module, call: ModelCall) -> dict[Key, torch.Tensor]:
    """The tensors that a program binds, by kind and path."""
    given = (call.leaves[at] for at in call.tensor_positions)
    return held_tensors(model) | {("input", str(at)): each for at, each in enumerate(given)}


def _names(model: nn.Module) -> dict[Key, Key]:
    first: dict[int, Key] = {}
    every: list[tuple[Key, torch.Tensor]] = []
    every += [(("parameter", name), each) for name, each in model.named_parameters("", True, False)]
    every += [(("buffer", name), each) for name, each in model.named_buffers("", True, False)]
    return {key: first.setdefault(id(each), key) for key, each in every}


def _returned(result: torch.Tensor) -> Returned:
    dtype, shape = str(result.dtype).removeprefix("torch."), tuple(result.shape)
    like = torch.empty_like(result, device="meta").stride()
    place = result.device.type
    return Returned(place, dtype, shape, result.stride(), like, result.requires_grad)


def _reached(
    results: Sequence[torch.Tensor], leaves: Mapping[Key, torch.Tensor]
) -> frozenset[Key] | None:
    ends = [each for each in results if each.requires_grad]
    if not ends or not leaves:
        return frozenset()
    try:
        ones = [torch.ones_like(each) for each in ends]
        found = torch.autograd.grad(ends, [*leaves.values()], ones, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        debug.log(1, "no real backward: %s", error)
        return None
    return frozenset(key for key, each in zip(leaves, found, strict=True) if each is not None)


class _Layouts(TorchFunctionMode):
    """Refuses results that are not strided. Some of them abort the process in a trace."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, tuple | list) else (result,)
        odd = next((each for each in found if _is_odd(each)), None)
        if odd is not None:
            name = getattr(func, "__name__", str(func))
            words = f"{name} makes a tensor of layout {odd.layout}, which kernels cannot read"
            raise LeftToEagerError(f"{_place()}{words}")
        return result


def _is_odd(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided


def _place() -> str:
    """The user's line that is running."""
    frames: list[SourceLocation] = []
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _seen.__code__:
        frames.append(SourceLocation(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    place = innermost(reversed(frames))
    return f"{place}: " if place else ""
