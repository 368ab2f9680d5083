"""Recurrent layers while a model is traced.

Tracing would unroll their steps. A few steps are as good as any other operators. Many would take
minutes to plan and run slower than PyTorch's own kernels, so such a layer stays one operator,
defined here for the trace alone. `runtime.recurrent` runs in its place.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from fusewright.ir.graph import RECURRENT
from fusewright.runtime.guard import _fw_autocast

MOST_STEPS = 4  # of all layers and directions together
_BACKWARD = "_backward"
_DROPOUT, _TRAINING = 6, 7  # positions among the operator's arguments
_CALL = (
    "Tensor data, Tensor? sizes, Tensor[] state, Tensor[] weights, bool biases, int layers, "
    "float dropout, bool training, bool two_ways, bool batch_first, ScalarType dtype, "
    "ScalarType? autocast"
)


@contextlib.contextmanager
def kept_or_written_out() -> Iterator[None]:
    """Unroll a few steps, and keep many as one operator. The weights, which are fakes now, stay
    where they are: on a GPU a layer would copy them into one block of memory."""
    before, tracing = nn.RNNBase.flatten_parameters, threading.get_ident()

    def flattened(self: nn.RNNBase) -> None:
        if threading.get_ident() != tracing:
            before(self)

    nn.RNNBase.flatten_parameters = flattened  # type: ignore[method-assign]
    for name in RECURRENT:
        run = getattr(torch._C._VariableFunctions, name)
        setattr(torch._VF, name, _counted(name, run, tracing))
    try:
        yield
    finally:
        nn.RNNBase.flatten_parameters = before  # type: ignore[method-assign]
        for name in RECURRENT:
            delattr(torch._VF, name)


def _counted(name: str, run: Callable[..., Any], tracing: int) -> Callable[..., Any]:
    """The same function for a few steps or for another thread; otherwise the operator.

    Arguments: input, state, weights, biases?, layers, dropout, training?, bidirectional?, batch
    first?. For packed sequences the second argument is their batch sizes.
    """

    def counted(*args: Any) -> Any:
        if threading.get_ident() != tracing:
            return run(*args)
        packed = isinstance(args[1], torch.Tensor) and isinstance(args[3], (tuple, list))
        sizes, rest = (args[1], [*args[2:], False]) if packed else (None, list(args[1:]))
        state, weights, _, layers, _, _, two_ways, batch_first = rest
        length = len(args[1]) if packed else args[0].shape[1 if batch_first else 0]
        if length * layers * (2 if two_ways else 1) <= MOST_STEPS:
            int(length)  # fixes the length: each step becomes nodes of the graph
            return run(*args)
        states = list(state) if name == "lstm" else [state]
        dtype = _result_dtype(run, args[0], states, rest)
        operator = getattr(torch.ops.fusewright, name)
        autocast = _fw_autocast(args[0].device.type)
        made = operator(args[0], sizes, states, list(weights), *rest[2:], dtype, autocast)
        return tuple(made[:-1])

    return counted


def _result_dtype(
    run: Callable[..., Any], data: torch.Tensor, states: list[torch.Tensor], rest: list[Any]
) -> torch.dtype:
    """The dtype that the layer returns. Autocast decides it by kind and device, so we run one step
    on zeros with PyTorch's own kernel."""
    device = data.device
    if not torch.is_autocast_enabled(device.type):
        return data.dtype
    with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():

        def zeros(of: torch.Tensor, shape: list[int]) -> torch.Tensor:
            return torch.zeros(shape, dtype=of.dtype, device=device)

        first: Any = [zeros(each, [each.shape[0], 1, each.shape[2]]) for each in states]
        first = first if isinstance(rest[0], (tuple, list)) else first[0]
        weights = [zeros(each, list(each.shape)) for each in rest[1]]
        biases, layers, _, _, two_ways, batch_first = rest[2:]
        how = (biases, layers, 0.0, False, two_ways, batch_first)
        result = run(zeros(data, [1, 1, data.shape[-1]]), first, weights, *how)[0]
        dtype: torch.dtype = result.dtype
        return dtype


def node_op(target: Any) -> str | None:
    """The name of such an operator in our graphs: torch.lstm, torch.lstm_backward."""
    name = str(target).removeprefix("fusewright.").removesuffix(".default")
    return f"torch.{name}" if name.removesuffix(_BACKWARD) in RECURRENT else None


def draws(node: fx.Node) -> bool:
    """Whether a layer of this trace uses dropout."""
    op = node_op(node.target)
    if op is None or op.endswith(_BACKWARD):
        return False
    rate: Any = node.args[_DROPOUT]
    return rate > 0 and bool(node.args[_TRAINING])


def save_what_layers_read(joint: fx.GraphModule) -> None:
    """A layer holds its arguments until backward, so recomputing them would save nothing."""
    for node in joint.graph.nodes:
        if node_op(node.target) is not None:
            for each in node.all_input_nodes:
                if each.op == "call_function" and isinstance(each.meta.get("val"), torch.Tensor):
                    each.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _defined(name: str) -> None:
    """Define the operators of one kind of layer: shapes and gradients, no kernels."""
    forward, backward = f"fusewright::{name}", f"fusewright::{name}{_BACKWARD}"
    torch.library.define(forward, f"({_CALL}) -> Tensor[]")
    torch.library.define(backward, f"(Tensor?[] changes, Tensor tape, {_CALL}) -> Tensor[]")
    torch.library.register_fake(forward, _results)
    torch.library.register_fake(backward, _gradients)

    def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        data, sizes, state, weights, *ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.counts = (len(state), len(weights))
        ctx.save_for_backward(output[-1], data, sizes, *state, *weights)

    def differentiate(ctx: Any, changes: list[torch.Tensor | None]) -> tuple[Any, ...]:
        tape, data, sizes, *rest = ctx.saved_tensors
        states, weights = rest[: ctx.counts[0]], rest[ctx.counts[0] :]
        operator = getattr(torch.ops.fusewright, f"{name}{_BACKWARD}")
        made = operator(changes[:-1], tape, data, sizes, states, weights, *ctx.options)
        last = 1 + len(states)
        return made[0], None, made[1:last], made[last:], *(None for _ in ctx.options)

    torch.library.register_autograd(forward, differentiate, setup_context=save_for_backward)


def _results(
    data: torch.Tensor, sizes: Any, state: list[torch.Tensor], weights: Any, *how: Any
) -> list[torch.Tensor]:
    *_, two_ways, batch_first, dtype, _ = how
    width = state[0].shape[-1] * (2 if two_ways else 1)
    last = [each.new_empty(each.shape, dtype=dtype) for each in state]
    tape = data.new_empty(0, dtype=torch.uint8)
    return [_by_steps(data, width, batch_first, dtype), *last, tape]


def _gradients(changes: Any, tape: torch.Tensor, *call: Any) -> list[torch.Tensor]:
    data, _, state, weights, *_, batch_first, _, _ = call
    given = [*state, *weights]
    by_input = _by_steps(data, data.shape[-1], batch_first, data.dtype)
    return [by_input, *(each.new_empty(each.shape) for each in given)]


def _by_steps(
    data: torch.Tensor, width: int, batch_first: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The values of all steps; in memory the steps come first, whatever the order of the axes."""
    shape = [*data.shape[:-1], width]
    if not batch_first:
        return data.new_empty(shape, dtype=dtype)
    shape[:2] = shape[1], shape[0]
    return data.new_empty(shape, dtype=dtype).transpose(0, 1)


for _name in RECURRENT:
    _defined(_name)
