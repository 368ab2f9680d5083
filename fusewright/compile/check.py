"""Compares new programs with eager once: outputs, gradients and buffers, on fresh values.

What a trace, a plan or a compiler gets wrong is found here, before the user's first call. Model and
arguments are copied. The elements of the arguments stand in reverse order, so that a value of the
example that became a constant shows, too.

Two right runs differ by rounding, and a deep network makes that large. So in doubt a float64 run
decides: our error must be like eager's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fusewright import debug
from fusewright.capture import in_mode
from fusewright.capture.call import ModelCall
from fusewright.capture.generators import restored_generators, watched_generators
from fusewright.capture.hooks import unhooked
from fusewright.capture.memory import has_room
from fusewright.capture.private import real_copy
from fusewright.capture.reachable import Reachable
from fusewright.capture.real_call import real_call
from fusewright.capture.tree import UnwritableError, tree_text
from fusewright.capture.witness import tensors_of
from fusewright.compile.distance import Limits, by_truth, difference, is_small
from fusewright.compile.owners import Modes
from fusewright.errors import first_line
from fusewright.runtime import call


@dataclass(frozen=True)
class Example:
    """The call for which the programs were made."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class _Settings:
    """How the example is run. `fresh`: its floating-point arguments are reversed. `every`: they
    all require gradients. `wide`: everything is in float64."""

    mode: str
    gradients: bool
    fresh: bool = True
    every: bool = True
    wide: bool = False


class _UnfitError(Exception):
    """No program fits the call, so there is nothing to compare."""


def found_different(example: Example, modes: Modes, limits: Limits) -> str:
    """What the programs do differently from eager. Empty if nothing, or if it cannot be told."""
    name = type(example.model).__name__
    given = ModelCall.of(example.args, example.kwargs)
    if Reachable(example.model).holds_state():
        debug.log(1, "%s is not compared with eager: a call may change others", name)
        return ""
    if not has_room(tensors_of(example.model, given).values()):
        debug.log(1, "%s is not compared with eager: there is too little memory", name)
        return ""
    with real_call(), torch.enable_grad():
        for mode in dict.fromkeys("train" if each.training else "eval" for each in modes):
            found = ""
            with _tried(example, "comparison"):
                found = _different_in(example, modes, mode, limits)
            if found:
                return f"in {mode} mode our kernels differ from eager: {found}"
    return ""


def _different_in(example: Example, modes: Modes, mode: str, limits: Limits) -> str:
    expected, drew, training = None, False, mode == "train"
    gradients = not any(each.forward_only for each in modes if each.training == training)
    for every, fresh in itertools.product((True, False), (True, False)):
        settings = _Settings(mode, gradients, fresh, every)
        with _tried(example, "eager"), watched_generators() as generators:
            found = _run(example, settings)
            drew, expected = generators.drew(), found
        if expected is not None:
            break
    if expected is None:
        return ""
    try:
        with restored_generators() if drew else contextlib.nullcontext():
            ours = _run(example, settings, modes)
    except (_UnfitError, torch.OutOfMemoryError) as error:
        debug.log(1, "%s is not compared: %s", type(example.model).__name__, error)
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    if drew or not difference(ours, expected, limits):
        # Random numbers may be drawn in another order, which is no error.
        return ""
    truth = None
    with _tried(example, "float64"):
        truth = _run(example, replace(settings, wide=True))
    return difference(ours, expected, limits, by_truth(truth, limits) if truth else is_small)


@contextlib.contextmanager
def _tried(example: Example, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the model, of a copy, or for want of memory
        debug.log(1, "no %s run of %s: %s", what, type(example.model).__name__, error)


def _run(example: Example, settings: _Settings, modes: Modes | None = None) -> dict[str, Tensor]:
    """What the example gives without gradients, then with them; by these programs, or by eager."""
    copies = real_copy(example.model, example.args, example.kwargs)
    if copies is None:
        raise _UnfitError("a copy would still use the model itself")
    model, args, kwargs = copies
    if settings.wide:
        model = model.double()
        args, kwargs = pytree.tree_map_only(Tensor, _widened, (args, kwargs))
    given = ModelCall.of(args, kwargs)
    inputs = [given.leaves[at] for at in given.tensor_positions]
    _prepare(inputs, settings)
    found = _Results()
    with in_mode(model, settings.mode), unhooked(model):
        with torch.no_grad():
            plain = found.add("without gradients ", _called(model, args, kwargs, modes))
        found.add_functions(plain)
        if settings.gradients:
            ends = found.add("", _called(model, args, kwargs, modes))
            leaves = {f"argument {at}": each for at, each in enumerate(inputs)}
            found.add_gradients(ends, {**leaves, **dict(model.named_parameters())})
        found.values |= {f"buffer {name}": each for name, each in model.named_buffers()}
    return found.values


def _widened(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _prepare(inputs: Sequence[Tensor], settings: _Settings) -> None:
    """Reverse the elements of arguments, and let them require gradients."""
    for each in inputs:
        if not each.is_floating_point() or not each.is_leaf:
            continue
        if settings.fresh and 0 not in each.stride():
            with torch.no_grad():
                each.copy_(each.flip(tuple(range(each.dim()))))
        if settings.every:
            each.requires_grad_()


def _called(model: nn.Module, args: Any, kwargs: Any, modes: Modes | None) -> Any:
    if modes is None:
        return model(*args, **kwargs)
    reason, result = call._fw_forward(modes, model, args, kwargs)
    if reason is not None:
        raise _UnfitError(reason)
    return result


class _Results:
    """What one run gave so far."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add(self, how: str, result: Any) -> list[Tensor]:
        """The tensors of a result. They are copied: a later call may write into them."""
        flat: list[Any] = []
        with contextlib.suppress(UnwritableError):
            tree_text(result, flat, {})
        found = [each for each in flat if isinstance(each, Tensor)]
        self.values |= {f"{how}output {at}": each.detach().clone() for at, each in enumerate(found)}
        return found

    def add_functions(self, results: Sequence[Tensor]) -> None:
        """Note which results of a call without gradients have a gradient function: forward may
        enable gradients itself, and our programs for such calls do not."""
        for at, each in enumerate(results):
            if each.grad_fn is not None:
                name = f"gradient function of output {at} in a call without gradients"
                self.values[name] = torch.tensor(True)

    def add_gradients(self, results: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> None:
        ends = [each for each in results if each.requires_grad]
        wanted = {name: each for name, each in leaves.items() if each.requires_grad}
        if not ends or not wanted:
            return
        given = [_cotangent(each) for each in ends]
        found = torch.autograd.grad(ends, [*wanted.values()], given, allow_unused=True)
        named = zip(wanted, found, strict=True)
        self.values |= {f"gradient of {name}": each for name, each in named if each is not None}


def _cotangent(result: Tensor) -> Tensor:
    """Numbers between -1 and 1 that repeat nowhere, so that no sum of them hides an error."""
    steps = torch.arange(result.numel(), device=result.device, dtype=torch.float64)
    return torch.cos(steps).reshape(result.shape).to(result.dtype)
