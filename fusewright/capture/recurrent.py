"""Recurrent layers while a model is traced.

Tracing writes their steps out one after the other. A few are as good as any other operators; many
would take minutes to plan and run slower than the library's own kernels: such a layer is an error
that says so, and what is around it can be optimized by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fusewright.errors import CaptureError

MOST_STEPS = 32  # of all layers and directions
_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """Few steps are written out, many refused; weights, fakes by now, stay where they are: on a GPU
    a layer would put them into one piece of memory."""
    before, tracing = nn.RNNBase.flatten_parameters, threading.get_ident()

    def flattened(self: nn.RNNBase) -> None:
        if threading.get_ident() != tracing:
            before(self)

    nn.RNNBase.flatten_parameters = flattened  # type: ignore[method-assign]
    for name in _LAYERS:
        run = getattr(torch._C._VariableFunctions, name)
        setattr(torch._VF, name, _counted(name, run, tracing))
    try:
        yield
    finally:
        nn.RNNBase.flatten_parameters = before  # type: ignore[method-assign]
        for name in _LAYERS:
            delattr(torch._VF, name)


def _counted(name: str, run: Callable[..., Any], tracing: int) -> Callable[..., Any]:
    """The same function where it has few steps, or another thread calls it.

    Arguments: input, state, weights, biases?, layers, dropout, training?, directions?, batch
    first?; of packed sequences the second are the sizes of their batches.
    """

    def counted(*args: Any) -> Any:
        if threading.get_ident() != tracing:
            return run(*args)
        packed = isinstance(args[1], torch.Tensor) and isinstance(args[3], (tuple, list))
        layers, two_ways = (args[5], args[8]) if packed else (args[4], args[7])
        length = len(args[1]) if packed else args[0].shape[1 if args[8] else 0]
        steps = int(length) * layers * (2 if two_ways else 1)
        if steps > MOST_STEPS:
            raise CaptureError(
                f"{name} has {steps} steps, which would be written out one by one (at most "
                f"{MOST_STEPS} are); PyTorch's own layer is faster: optimize the modules around it"
            )
        return run(*args)

    return counted
