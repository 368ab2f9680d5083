"""Recurrent layers, which stay PyTorch calls: cuDNN's kernels on a GPU, PyTorch's on the host.

PyTorch can differentiate a layer, so in training its autograd records the call. The record is an
attribute of an empty tensor, the tape, which is saved for backward like any other value. If there
is no record, backward runs the layer again: in evaluation, where cuDNN refuses a backward, and
where saved-tensor hooks (checkpointing, offloading) have replaced the tape by another tensor.
"""

import typing

import torch

_FW_RECORD = "_fw_record"


class _FwLayer:
    """One call of torch.lstm, torch.gru and so on; `sizes` are batch sizes of packed sequences.

    `autocast` is the dtype of autocast around the layer, or None if it is off there.
    """

    def __init__(
        self,
        kind: str,
        data: torch.Tensor,
        sizes: torch.Tensor | None,
        state: typing.Sequence[torch.Tensor],
        weights: typing.Sequence[torch.Tensor],
        biases: bool,
        layers: int,
        dropout: float,
        training: bool,
        two_ways: bool,
        batch_first: bool,
        dtype: torch.dtype,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.kind, self.dtype, self.autocast = kind, dtype, autocast
        self.data, self.sizes, self.state, self.weights = data, sizes, state, weights
        self.biases, self.layers, self.dropout, self.training = biases, layers, dropout, training
        self.two_ways, self.batch_first = two_ways, batch_first

    def run(self, tensors: typing.Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The output and the last states, from the input, the first states and the weights."""
        data, last = tensors[0], 1 + len(self.state)
        state: typing.Any = list(tensors[1:last])
        weights = list(tensors[last:])
        state = state if self.kind == "lstm" else state[0]
        rest = (weights, self.biases, self.layers, self.dropout, self.training, self.two_ways)
        layer = getattr(torch, self.kind)
        # Programs run with autocast off. How a layer computes under it is not in a trace.
        with torch.autocast(data.device.type, self.autocast, self.autocast is not None, False):
            if self.sizes is None:
                results = layer(data, state, *rest, self.batch_first)
            else:
                results = layer(data, self.sizes, state, *rest)
        return [each.to(self.dtype) for each in results]

    def recorded(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The layer's inputs and its results, connected by an autograd graph.

        Weights are not copied: cuDNN expects the weights of a layer in one piece of memory.
        """
        with torch.enable_grad():
            given = [self.data, *self.state, *self.weights]
            given = [each.detach().requires_grad_() for each in given]
            return given, self.run(given)


def _fw_recurrent(record: bool, *call: typing.Any) -> list[torch.Tensor]:
    """The layer's results and its tape. `record`: gradients will be needed."""
    layer = _FwLayer(*call)
    tape = torch.empty(0, dtype=torch.uint8, device=layer.data.device)
    if not (record and layer.training):
        with torch.no_grad():
            return [*layer.run([layer.data, *layer.state, *layer.weights]), tape]
    given, results = layer.recorded()
    setattr(tape, _FW_RECORD, (given, results))
    return [*[each.detach() for each in results], tape]


def _fw_recurrent_backward(
    want: typing.Sequence[bool],
    grad_outputs: typing.Sequence[torch.Tensor | None],
    tape: torch.Tensor,
    *call: typing.Any,
) -> list[torch.Tensor | None]:
    """The gradients of the input, the initial states and the weights; None where not wanted."""
    given, results = getattr(tape, _FW_RECORD, None) or _fw_once_more(_FwLayer(*call))
    pairs = zip(results, grad_outputs, strict=True)
    known = [(result, grad_output) for result, grad_output in pairs if grad_output is not None]
    # `want` may be shorter: the last inputs, whose gradients are never wanted, have no flag.
    chosen = [each for each, wanted in zip(given, want, strict=False) if wanted]
    found = torch.autograd.grad(
        [result for result, _ in known],
        chosen,
        [grad_output for _, grad_output in known],
        retain_graph=True,  # backward may run again; the graph is freed with the tape
        allow_unused=True,
    )
    made = iter(
        [torch.zeros_like(x) if g is None else g for x, g in zip(chosen, found, strict=True)]
    )
    return [next(made) if wanted else None for wanted in want]


def _fw_once_more(layer: _FwLayer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if layer.training and layer.dropout > 0 and layer.layers > 1:
        raise RuntimeError(
            f"{layer.kind} drops values at random, and only the saved tensors of its forward know "
            "which; checkpointing or saved-tensor hooks have replaced these tensors. Set the "
            "layer's dropout to 0, or call the original model"
        )
    # Training without dropout gives evaluation's values; cuDNN has gradients in training only.
    layer.training, layer.dropout = True, 0.0
    return layer.recorded()
