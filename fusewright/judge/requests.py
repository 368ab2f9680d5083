"""The judge's requests as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from fusewright.errors import ProblemError
from fusewright.judge.expectations import RATE
from fusewright.judge.findings import Asked
from fusewright.judge.state import held_tensors
from fusewright.judge.wire import Node, bytes_of, dtype_name, encoded, named_leaves
from fusewright.problem.inputs import named_tensors
from fusewright.problem.load import Problem
from fusewright.verify.attributes import Missing


class Message:
    """A request that is being written: its header, and the bytes of its tensors."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []

    def tensor(self, tensor: Tensor) -> Node:
        self.blobs.append(bytes_of(tensor))
        return {
            "tensor": len(self.blobs) - 1,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
        }

    def tree(self, tree: object, what: str) -> Node:
        node = encoded(tree, self.tensor)
        for name, leaf in named_leaves(what, node):
            if "other" in leaf:
                raise ProblemError(
                    f"{name} is a {leaf['other']}, which cannot be sent to another process; the "
                    "judge sends tensors, numbers, strings, data types, lists, tuples and dicts"
                )
        return node

    def tensors(self, named: Mapping[str, Tensor]) -> dict[str, Node]:
        return {name: self.tensor(each) for name, each in named.items()}


def load_request(path: Path, problem: Problem) -> tuple[Node, list[bytes]]:
    message, arguments = Message(), problem.make_init()
    what = "a constructor argument"
    positional = [message.tree(each, what) for each in arguments.positional]
    named = [[name, message.tree(each, what)] for name, each in arguments.named]
    header = {"do": "load", "path": str(path), "positional": positional, "named": named}
    return header, message.blobs


def weights_request(model: nn.Module) -> tuple[Node, list[bytes]]:
    message = Message()
    values = {name: each for _, name, each in held_tensors(model)}
    return {"do": "weights", "values": message.tensors(values)}, message.blobs


def step_request(gradients: Mapping[str, Tensor]) -> tuple[Node, list[bytes]]:
    message = Message()
    named = message.tensors(gradients)
    return {"do": "step", "gradients": named, "rate": RATE}, message.blobs


def call_request(
    asked: Sequence[Asked], number: int, *, keep: bool, input_gradients: bool
) -> tuple[Node, list[bytes]]:
    """A step's calls; they share one mode, and the buffers of the first."""
    message, step, first = Message(), asked[0].step, asked[0].expected.question
    attributes = {
        name: None if value is Missing else message.tree(value, name)
        for name, value in first.attributes.items()
    }
    calls = [
        {
            "inputs": _named_inputs(message, each),
            "tangents": message.tensors(each.expected.question.tangents if step.gradients else {}),
            "seed": each.expected.question.seed,
            "layout": step.layout,
            "how": step.how,
            "place": step.place,
            "slot": step.slot + index,
            "input_gradients": input_gradients and step.gradients and step.input_gradients,
        }
        for index, each in enumerate(asked)
    ]
    header = {
        "do": "call",
        "id": number,
        "mode": step.mode,
        "gradients": step.gradients,
        "keep": keep,
        "calls": calls,
        "buffers": message.tensors(first.buffers),
        "attributes": attributes,
    }
    return header, message.blobs


def _named_inputs(message: Message, asked: Asked) -> list[Node]:
    """The arguments; each tensor's node has its name."""
    inputs = asked.expected.question.inputs
    nodes = [message.tree(each, f"x{index}") for index, each in enumerate(inputs)]
    names = (name for name, _ in named_tensors(inputs))
    for index, node in enumerate(nodes):
        for _, leaf in named_leaves(f"x{index}", node):
            if "tensor" in leaf:
                leaf["name"] = next(names)
    return nodes
