"""From a live model to a `Program`. Every private PyTorch interface that we use is in this package.

AOTAutograd traces forward and backward into one joint graph on fake tensors, with the first
dimension of each input symbolic. PyTorch's min-cut partitioner decides, by bytes, which values are
saved and which are recomputed. Both graphs are then copied into our own frozen graph language. If
`Dim` cannot express a size, the capture starts again with fixed sizes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fusewright.capture.attributes import Changed, copied, restored
from fusewright.capture.call import ModelCall
from fusewright.capture.causal_masks import masks_not_compared
from fusewright.capture.convert import InexpressibleForwardError, InexpressibleSizeError
from fusewright.capture.find_line import culprit, overwriting
from fusewright.capture.hooks import unhooked
from fusewright.capture.program import UndifferentiableError
from fusewright.capture.scout import scout
from fusewright.capture.silence import silenced
from fusewright.capture.source_location import (
    Refused,
    SourceLocation,
    located,
    of_assignment,
    of_error,
    undifferentiable,
)
from fusewright.capture.state import Attribute, Key, is_fit, settle
from fusewright.capture.trace import ONE_AT_A_TIME, Attempt, trace
from fusewright.errors import CaptureError
from fusewright.ir.graph import Program

# PyTorch logs a traceback for every failure on fake tensors; our errors say the same in one line.
_FAKES_LOG = logging.getLogger("torch._subclasses.fake_tensor")
# A model whose attributes are different at each of so many calls gets no programs.
_MOST_STATES = 4
# What PyTorch says of a trace that changes in place a tensor it does not know as an input.
_UNKNOWN_STATE = ("mutating a non-functional tensor", "to have an entirely functional graph")
# What PyTorch says of a gradient that it cannot compute.
_NO_GRADIENT = ("modified by an inplace operation", "in-place operation", "derivative for")


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str,
    dynamic: bool = True,
) -> Program:
    """The program of most calls of `model` in `mode` (train or eval), from example arguments."""
    return captures(model, args, kwargs, mode=mode, dynamic=dynamic)[0]


def captures(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str,
    dynamic: bool = True,
    changed: Sequence[str] = (),
) -> tuple[Program, ...]:
    """All programs of `model` in `mode`, that of most calls first.

    There are several if forward changes attributes: the first call may find None where later ones
    find a hidden state. `changed` are attributes that the model is known to change in another mode.
    """
    call = ModelCall.of(args, kwargs or {})
    names = frozenset((path.rpartition(".")[0], path.rpartition(".")[2]) for path in changed)
    with ONE_AT_A_TIME, in_mode(model, mode), unhooked(model), _unlogged(), masks_not_compared():
        try:
            with restored(model):
                found = _all_states(model, call, mode, dynamic, names)
        except Exception as error:  # any error of the user's code becomes one named error
            raise located(error, _place(error, model, call), model) from error
    names |= {each.key for one in found for each in one.attributes}
    dotted = tuple(sorted(".".join(filter(None, key)) for key in names))
    last = len(found) - 1
    return tuple(
        replace(each.program, changed=dotted, variant="" if at == last else f"_call_{at + 1}")
        for at, each in reversed([*enumerate(found)])
    )


@dataclass(frozen=True)
class _Traced:
    """A program, the attributes that forward changes, and their values at the next call."""

    program: Program
    attributes: tuple[Attribute, ...]
    later: Mapping[Key, Any]


def _all_states(
    model: nn.Module, call: ModelCall, mode: str, dynamic: bool, known: frozenset[Key]
) -> list[_Traced]:
    """One program for each state that calls find the attributes in."""
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise CaptureError("it has no forward; write `def forward(self, …)`")
    found: list[_Traced] = []
    accepted: list[Mapping[Key, Any]] = []
    while True:
        one = _one_state(model, call, mode, dynamic, known)
        found.append(one)
        known |= {each.key for each in one.attributes}
        accepted.append(settle(model, one.attributes, one.later))
        strange = [is_fit(model, each) for each in accepted]
        if None in strange:
            return found
        if len(found) == _MOST_STATES:
            owner, name = strange[-1] or ("", "")
            dotted = ".".join(filter(None, (owner, name)))
            raise Refused(
                f"forward reads the attribute {dotted}, which is different at each call, so one "
                "graph cannot describe it; keep it in a tensor of one shape, or return it",
                of_assignment(model.get_submodule(owner), name),
            )


def _one_state(
    model: nn.Module, call: ModelCall, mode: str, dynamic: bool, known: frozenset[Key]
) -> _Traced:
    """The program for the attributes as they are now."""
    attributes = scout(model, call, known) if known else ()
    try:
        with copied(model):
            return _attempted(model, call, mode, dynamic, attributes)
    except Exception as error:
        unknown = isinstance(error, Changed) or any(each in str(error) for each in _UNKNOWN_STATE)
        if known or not unknown:
            raise
    attributes = scout(model, call, known)
    with copied(model):
        return _attempted(model, call, mode, dynamic, attributes)


def _attempted(
    model: nn.Module,
    call: ModelCall,
    mode: str,
    dynamic: bool,
    attributes: tuple[Attribute, ...],
) -> _Traced:
    """The first attempt takes gradients of every floating-point tensor, the next only of those that
    require them. If no tensor requires a gradient, sizes are fixed before gradients are given up.
    The last attempts take none, if PyTorch itself cannot compute them."""
    sizes = (True, False) if dynamic else (False,)
    attempts = [Attempt(size, which) for size in sizes for which in ("all", "required")]
    if not call.wants_gradients and not any(each.requires_grad for each in model.parameters()):
        attempts.sort(key=lambda attempt: attempt.gradients)
    failures: list[tuple[Attempt, Exception]] = []
    clones: set[int] = set()  # outputs to copy, as the attempts find them
    reason = ""
    while attempts:
        attempt = attempts.pop(0)
        if attempt.dynamic and any(isinstance(e, InexpressibleForwardError) for _, e in failures):
            continue
        try:
            with _trainable(model, attempt.gradients):
                program, later = trace(model, call, mode, attempt, clones, attributes)
            return _Traced(replace(program, forward_only=reason), attributes, later)
        except Exception as error:
            failures.append((attempt, error))
            if isinstance(error, Changed) and not attributes:
                raise
        if not attempts and not reason and (blamed := _gradient_failure(failures)):
            reason = undifferentiable(blamed, *overwriting(model, call), model)
            attempts = [Attempt(size, "none") for size in sizes]
    raise _most_telling(failures)


def _gradient_failure(failures: Sequence[tuple[Attempt, Exception]]) -> Exception | None:
    """The failure to compute a gradient of tensors that require one."""
    return next(
        (
            error
            for attempt, error in reversed(failures)
            if isinstance(error, UndifferentiableError)
            or (
                attempt.gradients == "required" and any(each in str(error) for each in _NO_GRADIENT)
            )
        ),
        None,
    )


def _place(error: Exception, model: nn.Module, call: ModelCall) -> SourceLocation | None:
    """The user's line behind a failure, if it is known."""
    if isinstance(error, Refused) and error.place is not None:
        return error.place
    found = of_error(error)
    return found or (culprit(model, call) if isinstance(error, CaptureError) else None)


def _most_telling(failures: Sequence[tuple[Attempt, Exception]]) -> Exception:
    """The failure to show. Fixed sizes tell more than the symbols of a dynamic trace, and the model
    as it is tells more than one with extra gradients."""
    telling = [each for each in failures if not isinstance(each[1], InexpressibleSizeError)]
    order = ("required", "all", "none")

    def rank(failure: tuple[Attempt, Exception]) -> tuple[bool, int]:
        return failure[0].dynamic, order.index(failure[0].gradients)

    return min(telling or failures, key=rank)[1]


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """PyTorch also warns of each gradient that it cannot compute."""
    before, _FAKES_LOG.disabled = _FAKES_LOG.disabled, True
    try:
        with silenced("Error detected in "):
            yield
    finally:
        _FAKES_LOG.disabled = before


@contextlib.contextmanager
def in_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Put the model into train or eval, and restore everything afterwards.

    A model that is in that mode already keeps the flags of its submodules, so a frozen batch norm
    in a training model stays frozen. Parameters and buffers are restored too: tracing swaps them
    for fakes and leaves some behind where submodules are tied.
    """
    before = [
        (module, module.training, dict(module._parameters), dict(module._buffers))
        for module in model.modules()
    ]
    if model.training != (mode == "train"):
        model.train(mode == "train")
    try:
        yield
    finally:
        for module, training, parameters, buffers in before:
            module.training = training
            module._parameters.update(parameters)
            module._buffers.update(buffers)


@contextlib.contextmanager
def _trainable(model: nn.Module, which: str) -> Iterator[None]:
    """Capture frozen parameters with their gradients, too, if `which` is all. They may be unfrozen
    later; until then, backward skips the gradients that are not needed. If it is none, capture no
    gradients."""
    before = [(each, each.requires_grad) for each in model.parameters() if each.is_leaf]
    for each, _ in before if which != "required" else ():
        if each.is_floating_point():
            each.requires_grad_(which == "all")
    try:
        yield
    finally:
        for each, required in before:
            each.requires_grad_(required)
