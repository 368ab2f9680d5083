"""The judge's requests as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from fusewright.errors import ProblemError
from fusewright.judge.placement import Piece, piece_of
from fusewright.judge.script import Step
from fusewright.judge.state import held_tensors
from fusewright.judge.variety import RATE
from fusewright.judge.wire import Node, bytes_of, dtype_name, encoded, named_leaves
from fusewright.problem.inputs import is_differentiable, laid_out, named_tensors
from fusewright.problem.load import Problem
from fusewright.verify.attributes import Missing, tensor_attributes
from fusewright.verify.feeds import Inputs
from fusewright.verify.scenarios import Question

# Begins the name of an incoming gradient, where inputs have the names of arguments.
GRADIENT = "gradient of"


@dataclass(frozen=True)
class CallFacts:
    """How a request is made, besides what its step says.

    `keep` the results for later, fill new memory with `poison`, take the results of the call
    before (`empty`), name the operators that run (`trace`), keep a GPU `busy` first, make the same
    call before it without gradients (`again`), measure its memory (`weigh`). The model's `detached`
    outputs take no part in backward.
    """

    number: int = 0
    keep: bool = False
    poison: bool = False
    busy: bool = False
    empty: bool = False
    trace: bool = False
    again: bool = False
    weigh: bool = False
    input_gradients: bool = True
    detached: tuple[str, ...] = ()


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
            "device": tensor.device.type,
        }

    def tree(self, tree: object, what: str) -> Node:
        return _sendable(encoded(tree, self.tensor), what)

    def tensors(self, named: Mapping[str, Tensor]) -> dict[str, Node]:
        return {name: self.tensor(each) for name, each in named.items()}


def _others(node: Node, what: str) -> dict[str, str]:
    """The leaves that cannot be sent, with their classes."""
    found = named_leaves(what, node)
    return {name: leaf["other"] for name, leaf in found if "other" in leaf}


def _sendable(node: Node, what: str) -> Node:
    for name, kind in _others(node, what).items():
        raise ProblemError(
            f"{name} is a {kind}, which cannot be sent to another process; the "
            "judge sends tensors, numbers, strings, data types, lists, tuples and dicts"
        )
    return node


def load_request(path: Path, problem: Problem, kind: str) -> tuple[Node, list[bytes]]:
    """Load a file: a `candidate`, or the problem's own model, `eager` or `compile`."""
    message, arguments = Message(), problem.make_init()
    what = "a constructor argument"
    positional = [message.tree(each, what) for each in arguments.positional]
    named = [[name, message.tree(each, what)] for name, each in arguments.named]
    header = {"do": "load", "path": str(path), "kind": kind}
    return {**header, "positional": positional, "named": named}, message.blobs


def weights_request(model: nn.Module) -> tuple[Node, list[bytes]]:
    message = Message()
    values = message.tensors({name: each for _, name, each in held_tensors(model)})
    attributes = _attributes(message, model)
    return {"do": "weights", "values": values, "attributes": attributes}, message.blobs


def write_request(model: nn.Module) -> tuple[Node, list[bytes]]:
    message = Message()
    values = {name: each for kind, name, each in held_tensors(model) if kind == "parameter"}
    return {"do": "write", "values": message.tensors(values)}, message.blobs


def _state(message: Message, model: nn.Module) -> dict[str, Node]:
    saved = model.state_dict().items()
    return message.tensors({name: each for name, each in saved if isinstance(each, Tensor)})


def load_weights_request(model: nn.Module) -> tuple[Node, list[bytes]]:
    message = Message()
    return {"do": "load weights", "state": _state(message, model)}, message.blobs


def copy_request(how: str, model: nn.Module) -> tuple[Node, list[bytes]]:
    """Only another instance needs values; a copy has them."""
    message, header = Message(), {"do": "copy", "how": how, "state": {}, "attributes": {}}
    if how == "instance":
        held = {"state": _state(message, model), "attributes": _attributes(message, model)}
        header |= held
    return header, message.blobs


def _attributes(message: Message, model: nn.Module) -> dict[str, Node]:
    return {
        full: node
        for full, value in tensor_attributes(model).items()
        if not _others(node := encoded(value, message.tensor), full)
    }


def step_request(gradients: Mapping[str, Tensor]) -> tuple[Node, list[bytes]]:
    message = Message()
    named = message.tensors(gradients)
    return {"do": "step", "gradients": named, "rate": RATE}, message.blobs


def call_request(
    step: Step, questions: Sequence[Question], call: CallFacts
) -> tuple[Node, list[bytes], list[Piece]]:
    """A step's calls; they share one mode, and the buffers of the first.

    The tensors of the calls are not sent: they are pieces, which the placement writes.
    """
    message, first = Message(), questions[0]
    attributes = {
        name: None if value is Missing else message.tree(value, name)
        for name, value in first.attributes.items()
    }
    pieces: list[Piece] = []
    calls = []
    for index, each in enumerate(questions):
        slot = step.slot + index
        tangents = [
            piece_of(
                index, (slot, f"{GRADIENT} {name}"), laid_out(tangent, step.layout), odd=step.odd
            )
            for name, tangent in (each.tangents if step.gradients else {}).items()
        ]
        calls.append(
            {
                "inputs": _placed_inputs(pieces, (index, slot), each.inputs, step, call),
                "tangents": dict(zip(each.tangents, (t.node for t in tangents), strict=False)),
                "seed": each.seed,
                "how": step.how,
                "place": step.place,
                "slot": slot,
            }
        )
        pieces += tangents
    header = {
        "do": "prepare",
        "id": call.number,
        "mode": step.mode,
        "gradients": step.gradients,
        "frozen": step.fixed,
        "twice": step.twice,
        "aside": step.aside,
        "part": step.part,
        "detached": call.detached,
        "keep": call.keep,
        "poison": call.poison,
        "busy": call.busy,
        "empty": call.empty,
        "trace": call.trace,
        "again": call.again,
        "weigh": call.weigh,
        "calls": calls,
        "buffers": message.tensors(first.buffers),
        "attributes": attributes,
    }
    return header, message.blobs, pieces


def _placed_inputs(
    pieces: list[Piece], key: tuple[int, int], inputs: Inputs, step: Step, call: CallFacts
) -> list[Node]:
    """The arguments; the node of each tensor says where it lies and if it requires a gradient."""
    names = iter([name for name, _ in named_tensors(inputs)])
    wanted = call.input_gradients and step.asks_input_gradients
    index, slot = key

    def placed(tensor: Tensor) -> Node:
        name = next(names)
        pieces.append(piece_of(index, (slot, name), tensor.detach(), odd=step.odd))
        pieces[-1].node["grad"] = wanted and name not in step.fixed and is_differentiable(tensor)
        return pieces[-1].node

    return [_sendable(encoded(each, placed), f"x{number}") for number, each in enumerate(inputs)]
