"""From a live model to a `Program`: every private interface of PyTorch that we use is here.

AOTAutograd traces forward and backward into one joint graph on fake tensors, with the first
dimension of each input symbolic; PyTorch's min-cut partitioner decides by bytes what is saved
and what is recomputed; the two halves are then copied into our own frozen graph language.
A size that our `Dim` cannot express makes the capture start again with fixed sizes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from fusewright.capture.call import Call
from fusewright.capture.convert import InexpressibleForwardError, InexpressibleSizeError
from fusewright.capture.find_line import culprit
from fusewright.capture.hooks import unhooked
from fusewright.capture.source_location import Place, Refused, located, of_error
from fusewright.capture.trace import trace
from fusewright.errors import CaptureError
from fusewright.ir.graph import Program

# It prints the traceback of whatever goes wrong on fake tensors; our errors say it in a line.
_FAKES_LOG = logging.getLogger("torch._subclasses.fake_tensor")
# Tracing replaces nn.Module's own methods for the whole process and puts back what it found: two
# threads at once would put back each other's.
_one_at_a_time = threading.RLock()


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str,
    dynamic: bool = True,
) -> Program:
    """Trace `model` in `mode` (train or eval) on example arguments.

    Gradients of all that is floating are tried first, then of what wants them as it is; where
    nothing does, sizes are fixed before gradients are given up.
    """
    call = Call.of(args, kwargs or {})
    attempts = [
        (dynamic_sizes, everything)
        for dynamic_sizes in ((True, False) if dynamic else (False,))
        for everything in (True, False)
    ]
    if not call.wants_gradients and not any(each.requires_grad for each in model.parameters()):
        attempts.sort(key=lambda attempt: not attempt[1])
    failures: list[tuple[tuple[bool, bool], Exception]] = []
    copied: set[int] = set()  # outputs, as attempts find them
    with _one_at_a_time, in_mode(model, mode), unhooked(model), _unlogged():
        if type(model).forward is nn.Module.forward and "forward" not in vars(model):
            missing = CaptureError("it has no forward; write `def forward(self, …)`")
            raise located(missing, None, model)
        for dynamic_sizes, everything in attempts:
            if dynamic_sizes and any(isinstance(e, InexpressibleForwardError) for _, e in failures):
                continue
            try:
                with _all_trainable(model, everything):
                    return trace(model, call, mode, dynamic_sizes, everything, copied)
            except Exception as error:  # whatever user code raises becomes one named error
                failures.append(((dynamic_sizes, everything), error))
        first = _most_telling(failures)
        raise located(first, _place(first, model, call), model) from first


def _place(error: Exception, model: nn.Module, call: Call) -> Place | None:
    """The user's line behind a failure, as far as it is known."""
    if isinstance(error, Refused) and error.place is not None:
        return error.place
    found = of_error(error)
    return found or (culprit(model, call) if isinstance(error, CaptureError) else None)


def _most_telling(failures: Sequence[tuple[tuple[bool, bool], Exception]]) -> Exception:
    """What to show: numbers tell more than the symbols of a trace with dynamic sizes, and the model
    as it is more than with gradients that nobody asked for."""
    telling = [each for each in failures if not isinstance(each[1], InexpressibleSizeError)]
    return min(telling or failures, key=lambda each: each[0])[1]


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    before, _FAKES_LOG.disabled = _FAKES_LOG.disabled, True
    try:
        yield
    finally:
        _FAKES_LOG.disabled = before


@contextlib.contextmanager
def in_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Put the model into train or eval, and everything back to what it was.

    A model that is in that mode already keeps the flags of its submodules: a frozen batch norm
    in a model that trains stays frozen. Tracing swaps parameters for fakes and, where submodules
    are tied, leaves some behind.
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
def _all_trainable(model: nn.Module, wanted: bool) -> Iterator[None]:
    """A frozen parameter is captured with its gradient too: it may be thawed later, and until
    then backward leaves out what nobody wants."""
    frozen = [
        each
        for each in model.parameters()
        if wanted and each.is_floating_point() and each.is_leaf and not each.requires_grad
    ]
    for each in frozen:
        each.requires_grad_(True)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(False)
