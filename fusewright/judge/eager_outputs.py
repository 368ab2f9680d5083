"""What the model's outputs are besides their values: containers, memory, gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from fusewright.judge.state import held_tensors
from fusewright.judge.wire import Node, encoded, named_leaves, sharing
from fusewright.problem.inputs import is_floating, named_tensors
from fusewright.verify.feeds import Inputs
from fusewright.verify.scenarios import Expected, Results


def outputs_node(outputs: object, model: nn.Module, inputs: Inputs) -> Node:
    """Containers, strides and shared memory."""
    known = [(f"{kind} {name}", each) for kind, name, each in held_tensors(model)]
    known += [(f"input {name}", each) for name, each in named_tensors(inputs)]
    tensors: list[Tensor] = []

    def number(tensor: Tensor) -> Node:
        tensors.append(tensor)
        return {"tensor": len(tensors) - 1}

    named = named_leaves("output", encoded(outputs, number))
    known += [(name, tensors[node["tensor"]]) for name, node in named if "tensor" in node]

    def described(tensor: Tensor) -> Node:
        return {"tensor": 0, "stride": list(tensor.stride()), "shares": sharing(tensor, known)}

    return encoded(outputs, described)


def detached_outputs(results: Results, tangents: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The outputs that require no gradient, in a model that has others."""
    named = (name for name, each in results.items() if is_floating(each))
    outputs = (each for each in named if each.startswith("output"))
    return tuple(each for each in outputs if tangents and each not in tangents)


def without_gradients(expected: Expected, names: Sequence[str]) -> Expected:
    """The same answers for a call in which these inputs and weights require no gradient."""
    dropped = {f"grad {name}" for name in names}
    eager = {
        layout: {name: each for name, each in results.items() if name not in dropped}
        for layout, results in expected.eager.items()
    }
    return replace(expected, eager=eager)
