"""Recurrent layers, which stay PyTorch's own: cuDNN's kernels on a GPU, PyTorch's on the host.

PyTorch knows how to differentiate a layer, so in training its autograd records it. The record hangs
on an empty tensor, the tape, which is saved for backward as any other value is. Where there is
none, backward runs the layer once more: in evaluation, where cuDNN would refuse, and where whoever
keeps saved tensors (checkpoints, offloading) has put another in the tape's place.
"""

import typing

import torch

_FW_RECORD = "_fw_record"


class _FwLayer:
    """One call of a layer, as torch.lstm and its like take it; `sizes` are of packed sequences."""

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
    ) -> None:
        self.kind, self.dtype = kind, dtype
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
        if self.sizes is None:
            results = layer(data, state, *rest, self.batch_first)
        else:
            results = layer(data, self.sizes, state, *rest)
        return [each.to(self.dtype) for each in results]

    def recorded(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What it is given and what it gives, with what autograd knows of how they hang together.

        Weights keep their places in memory: cuDNN reads those of a layer where they lie.
        """
        with torch.enable_grad():
            given = [self.data, *self.state, *self.weights]
            given = [each.detach().requires_grad_() for each in given]
            return given, self.run(given)


def _fw_recurrent(record: bool, *call: typing.Any) -> list[torch.Tensor]:
    """The layer's results and its tape; `record` asks for gradients."""
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
    changes: typing.Sequence[torch.Tensor | None],
    tape: torch.Tensor,
    *call: typing.Any,
) -> list[torch.Tensor | None]:
    """The gradients of the input, the first states and the weights: of those that are wanted."""
    given, results = getattr(tape, _FW_RECORD, None) or _fw_once_more(_FwLayer(*call))
    pairs = zip(results, changes, strict=True)
    changed = [(result, change) for result, change in pairs if change is not None]
    # Of the last ones nobody may have asked for any: they have no flag then.
    chosen = [each for each, wanted in zip(given, want, strict=False) if wanted]
    found = torch.autograd.grad(
        [result for result, _ in changed],
        chosen,
        [change for _, change in changed],
        retain_graph=True,  # whoever asks may ask again; with the tape all of it goes
        allow_unused=True,
    )
    made = iter(
        [torch.zeros_like(x) if g is None else g for x, g in zip(chosen, found, strict=True)]
    )
    return [next(made) if wanted else None for wanted in want]


def _fw_once_more(layer: _FwLayer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if layer.training and layer.dropout > 0 and layer.layers > 1:
        raise RuntimeError(
            f"{layer.kind} drops values at random, and what it dropped is known to the saved "
            "tensors of its forward alone, which were replaced; leave its dropout out, or call "
            "the original model where saved tensors are packed or computed anew"
        )
    # With dropout off this is evaluation too; cuDNN gives gradients in training only.
    layer.training, layer.dropout = True, 0.0
    return layer.recorded()
