"""The candidate's process: loads a stranger's file, and answers the judge's requests.

It is started before the candidate is known and keeps its own references to all that it calls. It
has copies of weights and inputs and no expected result. It decides nothing: it sends what came out,
as bytes, and the judge compares.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.judge.guarded import Guarded, fill_new_memory
from fusewright.judge.state import digest, function_watch, global_state, held_tensors
from fusewright.judge.wire import (
    Node,
    Unpacker,
    bytes_of,
    decoded,
    dtype_name,
    encoded,
    named_leaves,
    packed,
    tensor_of,
)
from fusewright.problem.inputs import laid_out
from fusewright.problem.load import Arguments, Problem, candidate_factory

_READ_BYTES = 1 << 20
_MOST_BYTES = 1 << 40
_MOST_WORDS = 2000


class Forward:
    """One call of the model: its inputs, what it returned, and its gradients."""

    def __init__(self, inputs: Mapping[str, tuple[Tensor, Guarded]], outputs: object) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.gradients: dict[str, Tensor | None] = {}


class Launcher:
    """The model, the memory of its inputs, and the results that must still hold later."""

    def __init__(self) -> None:
        self.model: nn.Module = nn.Module()
        self.path = ""
        self.replaced = function_watch()
        self.guards: dict[str, Guarded] = {}
        self.held: dict[str, Tensor] = {}
        self.slots: dict[tuple[int, str], tuple[Tensor, Guarded]] = {}
        self.kept: dict[int, list[Forward]] = {}
        self.blobs: list[bytes] = []
        self.sent: list[bytes] = []

    def answer(self, request: Node, blobs: list[bytes]) -> tuple[Node, list[bytes]]:
        """Do what a request asks for."""
        self.blobs, self.sent = blobs, []
        doing = {
            "load": self.load,
            "weights": self.set_weights,
            "copy": self.copy,
            "call": self.call,
            "step": self.optimizer_step,
            "recall": self.recall,
        }
        try:
            before = global_state()
            found = doing[request["do"]](request)
            state = {"before": before, "after": global_state(), "replaced": self.replaced()}
            return {**found, "state": state}, self.sent
        except BaseException as error:
            return {"error": self.described(error), "state": {"replaced": self.replaced()}}, []

    def load(self, request: Node) -> Node:
        """Run the candidate's file and construct its model."""
        self.path = request["path"]
        arguments = Arguments(
            tuple(self.tree(each) for each in request["positional"]),
            tuple((name, self.tree(each)) for name, each in request["named"]),
        )
        problem = Problem("", None, "", nn.Module, tuple, lambda: arguments)
        self.model = candidate_factory(self.path, problem)()
        return {"held": [_description(*each) for each in held_tensors(self.model)]}

    def set_weights(self, request: Node) -> Node:
        """Give the model the judge's values, in memory with guards, as `.to()` would do it."""
        self.guard({name: self.tensor(node) for name, node in request["values"].items()})
        return {"weights": self.weights_digest()}

    def copy(self, request: Node) -> Node:
        """Go on with a deep copy of the model."""
        self.model = copy.deepcopy(self.model)
        self.guard({n: e.detach().clone() for _, n, e in held_tensors(self.model)})
        return {"weights": self.weights_digest()}

    def guard(self, given: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for _, name, each in list(held_tensors(self.model)):
                guarded = Guarded(each.dtype, each.shape, given[name].contiguous().stride())
                guarded.write(given[name])
                each.data = guarded.view()
                self.guards[name], self.held[name] = guarded, each

    def call(self, request: Node) -> Node:
        """All forwards, then all backwards; results are copied as soon as they are there."""
        self.model.train(request["mode"] == "train")
        self.restore(request)
        forwards, answers = [], []
        for each in request["calls"]:
            forward, answer = self.forward(each, request["gradients"])
            forwards.append(forward)
            answers.append(answer)
        for each, forward, answer in zip(request["calls"], forwards, answers, strict=True):
            if request["gradients"]:
                answer["spoiled"] = self.backward(each, forward)
                answer["gradients"] = self.sent_gradients(forward)
        if request["keep"]:
            self.kept[request["id"]] = forwards
        attributes = {name: self.attribute(name) for name in request["attributes"]}
        return {
            "calls": answers,
            "buffers": {n: self.send(e) for k, n, e in held_tensors(self.model) if k == "buffer"},
            "attributes": attributes,
            "weights": self.weights_digest(),
            "damaged": self.damaged(),
        }

    def forward(self, call: Node, gradients: bool) -> tuple[Forward, Node]:
        inputs: dict[str, tuple[Tensor, Guarded]] = {}

        def placed(node: Node) -> Tensor:
            inputs[node["name"]] = self.place(node, call)
            return inputs[node["name"]][0]

        arguments = [decoded(each, placed) for each in call["inputs"]]
        given = {name: bytes_of(each) for name, (each, _) in inputs.items()}
        torch.manual_seed(call["seed"])
        random = bytes_of(torch.get_rng_state())
        without = torch.inference_mode if call["how"] == "inference" else torch.no_grad
        with nullcontext() if gradients else without():
            outputs = self.model(*arguments)
        answer: Node = {"outputs": self.results(outputs, inputs)}
        answer["random"] = random != bytes_of(torch.get_rng_state())
        answer["changed"] = {
            name: self.send(each)
            for name, (each, _) in inputs.items()
            if bytes_of(each) != given[name]
        }
        return Forward(inputs, outputs), answer

    def backward(self, call: Node, forward: Forward) -> bool:
        """The gradients of all inputs and parameters that require one.

        Returns whether the incoming gradients have other values afterwards.
        """
        leaves = dict(_tensors(forward.outputs))
        roots, seeds = [], []
        for name, node in call["tangents"].items():
            root, tangent = leaves.get(name), self.tensor(node)
            if root is not None and root.requires_grad and root.shape == tangent.shape:
                roots.append(root)
                seeds.append(laid_out(tangent.to(root.dtype), call["layout"]))
        targets = {n: each for n, (each, _) in forward.inputs.items() if each.requires_grad}
        targets |= {n: e for k, n, e in held_tensors(self.model) if k == "parameter"}
        targets = {name: each for name, each in targets.items() if each.requires_grad}
        given = [bytes_of(each) for each in seeds]
        found: Sequence[Tensor | None] = [None] * len(targets)
        if roots and call["how"] == "grad":
            inputs = list(targets.values())
            found = torch.autograd.grad(roots, inputs, seeds, allow_unused=True)
        elif roots:
            for each in targets.values():
                each.grad = None
            torch.autograd.backward(roots, seeds)
            found = [each.grad for each in targets.values()]
            for each in targets.values():
                each.grad = None
        forward.gradients = dict(zip(targets, found, strict=True))
        return given != [bytes_of(each) for each in seeds]

    def optimizer_step(self, request: Node) -> Node:
        """Change the weights in place, as SGD does it, with the judge's gradients."""
        named = {n: e for kind, n, e in held_tensors(self.model) if kind == "parameter"}
        with torch.no_grad():
            for name, node in request["gradients"].items():
                named[name].add_(self.tensor(node), alpha=-request["rate"])
        return {"weights": self.weights_digest()}

    def recall(self, request: Node) -> Node:
        """The results of earlier calls, as they are now."""
        found = {}
        for number in request["ids"]:
            forwards = self.kept.pop(number)
            found[number] = [
                {
                    "outputs": self.results(each.outputs, each.inputs),
                    "gradients": self.sent_gradients(each),
                }
                for each in forwards
            ]
        return {"found": found, "damaged": self.damaged()}

    def place(self, node: Node, call: Node) -> tuple[Tensor, Guarded]:
        """A tensor with new values: in new memory, at an old address, or the old tensor itself."""
        slot = (call["slot"], node["name"])
        values = self.tensor(node)
        tensor, guarded = self.slots.get(slot, (values, None))
        form = (values.dtype, tuple(values.shape), tuple(node["stride"]))
        place = call["place"]
        if guarded is None or guarded.form != form or place == "fresh":
            guarded, place = Guarded(*form), "fresh"
        guarded.write(values)
        wanted = call["input_gradients"] and (values.is_floating_point() or values.is_complex())
        if place != "same" or tensor.requires_grad != wanted:
            tensor = guarded.view().requires_grad_(wanted)
        tensor.grad = None
        self.slots[slot] = (tensor, guarded)
        return tensor, guarded

    def restore(self, request: Node) -> None:
        """The buffers and the attributes that the model changes, as they are before each call."""
        given = {name: self.tensor(node) for name, node in request["buffers"].items()}
        with torch.no_grad():
            for kind, name, each in held_tensors(self.model):
                if kind == "buffer" and bytes_of(each) != bytes_of(given[name]):
                    each.copy_(given[name])
        for full, node in request["attributes"].items():
            held, name = self.holder(full)
            if node is None:
                held.pop(name, None)
            else:
                held[name] = self.tree(node)

    def holder(self, full: str) -> tuple[dict[str, Any], str]:
        path, _, name = full.rpartition(".")
        return vars(self.model.get_submodule(path)), name

    def attribute(self, full: str) -> Node | None:
        held, name = self.holder(full)
        return encoded(held[name], self.send) if name in held else None

    def results(self, outputs: object, inputs: Mapping[str, tuple[Tensor, Guarded]]) -> Node:
        """The outputs, with the names of everything whose memory they share."""
        known = [(f"{kind} {name}", each) for kind, name, each in held_tensors(self.model)]
        known += [(f"input {name}", each) for name, (each, _) in inputs.items()]
        known += _tensors(outputs)
        return encoded(outputs, lambda each: {**self.send(each), "shares": sharing(each, known)})

    def sent_gradients(self, forward: Forward) -> dict[str, Node | None]:
        def sent(tensor: Tensor | None) -> Node | None:
            return None if tensor is None else encoded(tensor, self.send)

        return {name: sent(each) for name, each in forward.gradients.items()}

    def damaged(self) -> list[str]:
        """Everything whose guards were overwritten."""
        guards = {**self.guards, **{f"input {name}": g for (_, name), (_, g) in self.slots.items()}}
        return [name for name, each in guards.items() if not each.is_intact]

    def weights_digest(self) -> str:
        held = [each for each in held_tensors(self.model) if each[0] == "parameter"]
        if any(self.held.get(name) is not each for _, name, each in held):
            return "other tensor objects"
        return digest([(f"{name} {e.requires_grad}", bytes_of(e)) for _, name, e in held])

    def send(self, tensor: Tensor) -> Node:
        if tensor.device.type != "cpu":
            return {"other": f"tensor on {tensor.device}"}
        self.sent.append(bytes_of(tensor))
        return {
            "tensor": len(self.sent) - 1,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "grad": tensor.requires_grad,
        }

    def tensor(self, node: Node) -> Tensor:
        return tensor_of(self.blobs[node["tensor"]], node["dtype"], node["shape"])

    def tree(self, node: Node) -> Any:
        return decoded(node, self.tensor)

    def described(self, error: BaseException) -> Node:
        trace = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in trace if frame.f_code.co_filename == self.path]
        words = str(error)[:_MOST_WORDS]
        return {"type": type(error).__name__, "words": words, "line": lines[-1] if lines else None}


def sharing(tensor: Tensor, known: Sequence[tuple[str, Tensor]]) -> list[str]:
    """The names of other tensors in the same memory."""
    address = tensor.untyped_storage().data_ptr()
    return [
        name
        for name, each in known
        if each is not tensor and address and each.untyped_storage().data_ptr() == address
    ]


def _tensors(outputs: object) -> list[tuple[str, Tensor]]:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Node:
        found.append(tensor)
        return {"tensor": len(found) - 1}

    nodes = named_leaves("output", encoded(outputs, keep))
    return [(name, found[node["tensor"]]) for name, node in nodes if "tensor" in node]


def _description(kind: str, name: str, tensor: Tensor) -> list[object]:
    form = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    gradient = " with gradient" if tensor.requires_grad else ""
    return [kind, name, form + gradient]


def serve(requests: int, replies: int) -> None:
    """Answer one request after the other until there are no more."""
    launcher, read, write = Launcher(), os.read, os.write

    def send(header: Node, blobs: Sequence[bytes]) -> None:
        for part in (packed(header, blobs), *blobs):
            rest = memoryview(part)
            while rest:
                rest = rest[write(replies, rest) :]

    send({"nonce": "ready"}, [])
    while True:
        unpacker = Unpacker(_MOST_BYTES)
        while not unpacker.is_complete:
            part = read(requests, _READ_BYTES)
            if not part:
                return
            unpacker.feed(part)
        request, blobs = unpacker.message()
        answer, sent = launcher.answer(request, blobs)
        send({**answer, "nonce": request["nonce"]}, sent)


def main() -> None:
    """The two arguments are the descriptors of requests and answers."""
    requests, replies = map(int, sys.argv[1:3])
    for each in (requests, replies):
        os.set_inheritable(each, False)
    torch.set_num_threads(int(sys.argv[3]))
    fill_new_memory()
    # Nobody finds the launcher by its name.
    for name in [name for name in sys.modules if name.startswith("fusewright.judge")]:
        del sys.modules[name]
    sys.argv[:] = [str(Path(sys.argv[0]).name)]
    serve(requests, replies)


if __name__ == "__main__":
    main()
