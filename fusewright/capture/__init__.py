"""From a live model to a `Program`: every private interface of PyTorch that we use is here.

AOTAutograd traces forward and backward into one joint graph on fake tensors, with the first
dimension of each input symbolic; PyTorch's min-cut partitioner decides by bytes what is saved
and what is recomputed; the two halves are then copied into our own frozen graph language.
A size that our `Dim` cannot express makes the capture start again with fixed sizes.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusewright.capture.call import Call
from fusewright.capture.convert import InexpressibleSizeError
from fusewright.capture.hooks import unhooked
from fusewright.capture.trace import trace
from fusewright.errors import CaptureError
from fusewright.ir import Program

_OTHERS = (Path(torch.__file__).parent, Path(__file__).parent)
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
    """Trace `model` in `mode` (train or eval) on example arguments."""
    call = Call.of(args, kwargs or {})
    attempts = [
        (dynamic_sizes, gradients)
        for dynamic_sizes in ((True, False) if dynamic else (False,))
        for gradients in ("floating", "as given")
    ]
    failures: list[Exception] = []
    with _one_at_a_time, in_mode(model, mode), unhooked(model):
        for dynamic_sizes, gradients in attempts:
            everything = gradients == "floating"
            try:
                with _all_trainable(model, everything):
                    return trace(model, call, mode, dynamic_sizes, everything)
            except Exception as error:  # whatever user code raises becomes one named error
                failures.append(error)
    telling = [each for each in failures if not isinstance(each, InexpressibleSizeError)]
    first = (telling or failures)[0]
    if isinstance(first, CaptureError):
        raise first
    raise _explained(first, model) from first


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


def _explained(error: Exception, model: nn.Module) -> CaptureError:
    """The error as a sentence that points at the deepest line of the user's own code."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not any(folder in Path(frame.filename).resolve().parents for folder in _OTHERS)
    ]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    line = f"\n    {frames[-1].line}" if frames and frames[-1].line else ""
    kind = type(error).__name__
    if "DataDependent" in kind:
        text = (
            "the model's control flow or a shape depends on the values of a tensor, so there is "
            "no one graph for it; use torch.where or move the decision out of the model"
        )
    else:
        text = f"{kind}: {str(error).strip().splitlines()[0] if str(error).strip() else kind}"
    return CaptureError(f"{where}cannot capture {type(model).__name__}: {text}{line}")
