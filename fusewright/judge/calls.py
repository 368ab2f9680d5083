"""One call in the candidate's process: what it is given, what it returned, its gradients."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusewright.judge.script import ADDED_UP
from fusewright.judge.state import form_of, held_tensors
from fusewright.judge.wire import (
    EARLIER,
    Node,
    bytes_of,
    dtype_name,
    encoded,
    named_leaves,
    sharing,
)

_MOST_WORDS = 2000
# Baselines by name, with their modes of torch.compile.
COMPILED = {"compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}


class Call:
    """One call of the model: what it is given, what it returned, and its gradients."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.inputs: dict[str, Tensor] = {}
        self.tangents: dict[str, Tensor] = {}
        self.arguments: list[object] = []
        self.outputs: object = None
        self.gradients: dict[str, Tensor | None] = {}

    def leaves(self) -> list[Tensor]:
        return [each for _, each in tensors_of(self.outputs)]


def take_gradients(call: Call, model: nn.Module, detached: Sequence[str] = ()) -> None:
    """The gradients of all inputs and parameters that require one.

    From outputs that are `detached` in the model no gradient may come here, either.
    """
    leaves = dict(tensors_of(call.outputs))
    roots = [leaves[name] for name in detached if name in leaves and leaves[name].requires_grad]
    seeds = [torch.ones_like(each) for each in roots]
    for name, tangent in call.tangents.items():
        root = leaves.get(name)
        if root is not None and root.requires_grad and root.shape == tangent.shape:
            roots.append(root)
            seeds.append(tangent.to(root.dtype))
    targets = {n: each for n, each in call.inputs.items() if each.requires_grad}
    targets |= parameters_of(model)
    targets = {name: each for name, each in targets.items() if each.requires_grad}
    found: Sequence[Tensor | None] = [None] * len(targets)
    if roots and call.node["how"] == "grad":
        inputs = list(targets.values())
        found = torch.autograd.grad(roots, inputs, seeds, allow_unused=True)
    elif roots:
        for each in targets.values():
            each.grad = None
        times = 2 if call.node["how"] == ADDED_UP else 1
        for left in reversed(range(times)):
            torch.autograd.backward(roots, seeds, retain_graph=bool(left))
        found = [each.grad for each in targets.values()]
        if times > 1:  # exact in every floating type
            found = [None if each is None else each / times for each in found]
        for each in targets.values():
            each.grad = None
    call.gradients = dict(zip(targets, found, strict=True))


def with_own_gradients(calls: Sequence[Call]) -> list[Call]:
    """The calls with copies of gradients that are incoming ones, as an addition's: that memory is
    the judge's, which writes there again."""
    for call in calls:
        given = list(call.tangents.items())
        for name, each in call.gradients.items():
            if each is not None and is_among(each, given):
                call.gradients[name] = each.clone()
    return list(calls)


def is_among(tensor: Tensor, known: Sequence[tuple[str, Tensor]]) -> bool:
    """Whether a tensor, or its memory, is one of these."""
    return any(each is tensor for _, each in known) or bool(sharing(tensor, known))


def shared_memory(call: Call, model: nn.Module, earlier: Sequence[Call]) -> dict[str, list[str]]:
    """For each output, the names of everything whose memory it shares."""
    outputs = tensors_of(call.outputs)
    known = [(f"{kind} {name}", each) for kind, name, each in held_tensors(model)]
    known += [(f"input {name}", each) for name, each in call.inputs.items()]
    known += outputs
    # The very same tensor shares its memory, too. Another object stands for it.
    known += [(EARLIER, each.detach()) for old in earlier for each in old.leaves()]
    return {name: sharing(each, known) for name, each in outputs}


def tensors_of(outputs: object) -> list[tuple[str, Tensor]]:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Node:
        found.append(tensor)
        return {"tensor": len(found) - 1}

    nodes = named_leaves("output", encoded(outputs, keep))
    return [(name, found[node["tensor"]]) for name, node in nodes if "tensor" in node]


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each for kind, name, each in held_tensors(model) if kind == "parameter"}


def set_mode(model: nn.Module, training: bool, part: str) -> None:
    """The mode of the whole model, and the other one for a part, if it has that part."""
    model.train(training)
    if part in dict(model.named_modules()) and part:
        model.get_submodule(part).train(not training)


def restore_buffers(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Write these values where others are; what has them already is not touched."""
    with torch.no_grad():
        for kind, name, each in held_tensors(model):
            if kind == "buffer" and bytes_of(each) != bytes_of(given[name]):
                each.copy_(given[name])


def failure_of(error: BaseException, path: str) -> Node:
    """An exception as the judge is told of it, with the last line of the file that it came from."""
    trace = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in trace if frame.f_code.co_filename == path]
    words = str(error)[:_MOST_WORDS]
    return {"type": type(error).__name__, "words": words, "line": lines[-1] if lines else None}


def described(tensor: Tensor, number: int) -> Node:
    return {
        "tensor": number,
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(Tensor.stride(tensor)),
        "grad": tensor.requires_grad,
    }


def description(kind: str, name: str, tensor: Tensor) -> list[object]:
    return [kind, name, form_of(tensor)]
