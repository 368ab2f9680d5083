"""From a live model to a `Program`. Every private PyTorch interface that we use is in this package.

AOTAutograd traces forward and backward into one joint graph on fake tensors, with the first
dimension of each input symbolic. PyTorch's min-cut partitioner decides, by bytes, which values are
saved and which are recomputed. Both graphs are then copied into our own frozen graph language. If
`Dim` cannot express a size, the capture starts again with fixed sizes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from fusewright.capture.call import ModelCall
from fusewright.capture.convert import InexpressibleForwardError, InexpressibleSizeError
from fusewright.capture.find_line import culprit
from fusewright.capture.hooks import unhooked
from fusewright.capture.source_location import Refused, SourceLocation, located, of_error
from fusewright.capture.trace import trace
from fusewright.errors import CaptureError
from fusewright.ir.graph import Program

# PyTorch logs a traceback for every failure on fake tensors; our errors say the same in one line.
_FAKES_LOG = logging.getLogger("torch._subclasses.fake_tensor")
# Tracing replaces methods of nn.Module for the whole process and restores them afterwards. Two
# threads at once would restore each other's replacements.
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

    The first attempt takes gradients of every floating-point tensor, the next only of those that
    require them. If no tensor requires a gradient, sizes are fixed before gradients are given up.
    """
    call = ModelCall.of(args, kwargs or {})
    attempts = [
        (dynamic_sizes, everything)
        for dynamic_sizes in ((True, False) if dynamic else (False,))
        for everything in (True, False)
    ]
    if not call.wants_gradients and not any(each.requires_grad for each in model.parameters()):
        attempts.sort(key=lambda attempt: not attempt[1])
    failures: list[tuple[tuple[bool, bool], Exception]] = []
    copied: set[int] = set()  # outputs to copy, as the attempts find them
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
            except Exception as error:  # any error of the user's code becomes one named error
                failures.append(((dynamic_sizes, everything), error))
        first = _most_telling(failures)
        raise located(first, _place(first, model, call), model) from first


def _place(error: Exception, model: nn.Module, call: ModelCall) -> SourceLocation | None:
    """The user's line behind a failure, if it is known."""
    if isinstance(error, Refused) and error.place is not None:
        return error.place
    found = of_error(error)
    return found or (culprit(model, call) if isinstance(error, CaptureError) else None)


def _most_telling(failures: Sequence[tuple[tuple[bool, bool], Exception]]) -> Exception:
    """The failure to show. Fixed sizes tell more than the symbols of a dynamic trace, and the model
    as it is tells more than one with extra gradients."""
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
def _all_trainable(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Capture frozen parameters with their gradients, too. They may be unfrozen later; until then,
    backward skips the gradients that are not needed."""
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
