"""Answers the judge's requests in the candidate's process.

A call has three requests. `prepare` sets mode, buffers and the tensors that will be given. `go`
calls the model and copies the results to the judge's memory, and nothing else, because its time
counts. `report` tells what else happened. The launcher decides nothing, and it has no expected
result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.judge.arena import Arena, aligned
from fusewright.judge.calls import (
    COMPILED,
    Call,
    described,
    description,
    failure_of,
    is_among,
    parameters_of,
    restore_buffers,
    set_mode,
    shared_memory,
    take_gradients,
    with_own_gradients,
)
from fusewright.judge.copies import another
from fusewright.judge.device import Device, Placed
from fusewright.judge.guarded import Guarded, memory_filler
from fusewright.judge.memory import gives_back
from fusewright.judge.operators import operators_of
from fusewright.judge.state import global_state, held_tensors, saved_forms, weights_digest
from fusewright.judge.watch import function_watch
from fusewright.judge.wire import (
    Node,
    bytes_of,
    decoded,
    dense,
    dtype_of,
    encoded,
    tensor_of,
)
from fusewright.problem.load import Arguments, Problem, candidate_factory, load_problem
from fusewright.verify.attributes import share_attributes

OnTensor = Callable[[Tensor], Node]


class Launcher:
    """The model, the tensors that it is given, and the results that must still hold later."""

    def __init__(self, arena: Arena, device: Device) -> None:
        self.arena, self.device = arena, device
        self.model: nn.Module = nn.Module()
        self.make: Callable[[], nn.Module] = nn.Module
        self.path, self.end = "", 0
        self.replaced = function_watch()
        self.fill_memory, self.give_back = memory_filler(), gives_back()
        self.guards: dict[str, Guarded] = {}
        self.held: dict[str, Tensor] = {}
        self.slots: dict[tuple[int, str], tuple[tuple[int, int], Placed, Tensor]] = {}
        self.placed: list[Placed] = []
        self.kept: dict[int, list[Call]] = {}
        self.calls: list[Call] = []
        self.prepared: Node = {}
        self.before: Node = {}
        self.blobs: list[bytes] = []
        self.sent: list[bytes] = []
        self.sizes: list[int] = []
        self.frozen: list[Tensor] = []

    def answer(self, request: Node, blobs: list[bytes]) -> tuple[Node, list[bytes]]:
        """Do what a request asks for."""
        self.blobs, self.sent, self.sizes, self.end = blobs, [], [], 0
        try:
            if request["do"] == "go":
                return {**self.run(), "placed": self.sizes}, self.sent
            doing = {
                "load": self.load,
                "weights": self.set_weights,
                "copy": self.copy,
                "load weights": self.load_weights,
                "prepare": self.prepare,
                "report": self.report,
                "step": self.optimizer_step,
                "write": self.write,
                "recall": self.recall,
            }
            before = global_state()
            found = doing[request["do"]](request)
            state = {"before": before, "after": global_state(), "replaced": self.replaced()}
            return {"state": state, **found}, self.sent
        except BaseException as error:
            return {
                "error": failure_of(error, self.path),
                "state": {"replaced": self.replaced()},
            }, []

    def load(self, request: Node) -> Node:
        """Run a file and construct its model: the candidate's, or the problem's own."""
        self.path = request["path"]
        arguments = Arguments(
            tuple(self.tree(each) for each in request["positional"]),
            tuple((name, self.tree(each)) for name, each in request["named"]),
        )
        if request["kind"] == "candidate":
            problem = Problem("", None, "", nn.Module, tuple, lambda: arguments)
            self.make = candidate_factory(self.path, problem)
        else:
            self.make = load_problem(self.path).make_model
        self.model = self.device.moved(self.make())
        if request["kind"] in COMPILED:
            self.model.compile(mode=COMPILED[request["kind"]])
        return {
            "held": [description(*each) for each in held_tensors(self.model)],
            "saved": saved_forms(self.model),
        }

    def set_weights(self, request: Node) -> Node:
        """Give the model the judge's values, in memory with guards, as `.to()` would do it."""
        self.guard(self.tensors(request["values"]))
        share_attributes(self.trees(request["attributes"]), self.model)
        return {"weights": self.weights_digest()}

    def load_weights(self, request: Node) -> Node:
        """New values by way of `load_state_dict`, as from a file."""
        self.model.load_state_dict(self.tensors(request["state"]))
        return {"weights": self.weights_digest()}

    def copy(self, request: Node) -> Node:
        """Go on with a copy of the model, or with another one that loads its weights."""
        before = [(name, each) for _, name, each in held_tensors(self.model)]
        made = another(self.model, request["how"], self.make, self.tensors(request["state"]))
        self.model = self.device.moved(made)
        share_attributes(self.trees(request["attributes"]), self.model)
        held = list(held_tensors(self.model))
        shared = [name for _, name, each in held if is_among(each, before)]
        self.guard({n: e.detach().clone() for _, n, e in held})
        return {"weights": self.weights_digest(), "shared": shared}

    def guard(self, given: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for _, name, each in list(held_tensors(self.model)):
                values = given[name].contiguous().to(each.device)
                form = (each.dtype, tuple(each.shape), values.stride())
                guarded = self.device.guarded(form)
                guarded.fill(values)
                each.data = guarded.view()
                self.guards[name], self.held[name] = guarded, each

    def prepare(self, request: Node) -> Node:
        """Everything that a call needs; the values of its tensors come later."""
        self.prepared, self.placed, previous = request, [], self.calls
        self.fill_memory(request["poison"])
        self.device.poison(request["poison"])
        if request["weigh"]:
            self.give_back()
        self.restore(request)  # before `eval()`, where a file may fold statistics
        set_mode(self.model, request["mode"] == "train", request["part"])
        self.freeze(request["frozen"])  # names of weights, and of inputs
        self.calls = [self.placed_call(each) for each in request["calls"]]
        if request["empty"]:
            for call, old in zip(self.calls, previous, strict=True):
                call.outputs, call.gradients = old.outputs, old.gradients
        self.before = global_state(self.model)
        return {}

    def freeze(self, names: Sequence[str]) -> None:
        """Let these weights require no gradient, and those again that did."""
        for each in self.frozen:
            each.requires_grad_(True)
        self.frozen = [e for _, n, e in held_tensors(self.model) if n in names and e.requires_grad]
        for each in self.frozen:
            each.requires_grad_(False)

    def placed_call(self, node: Node) -> Call:
        call = Call(node)

        def placed(leaf: Node) -> Tensor:
            call.inputs[leaf["name"]] = self.place(leaf, node)
            return call.inputs[leaf["name"]]

        call.arguments = [decoded(each, placed) for each in node["inputs"]]
        for name, leaf in node["tangents"].items():
            call.tangents[name] = self.at(leaf).view()
        return call

    def at(self, node: Node) -> Placed:
        form = (dtype_of(node["dtype"]), tuple(node["shape"]), tuple(node["stride"]))
        placed = self.device.placed(self.arena, node["offset"], form, node["shift"])
        self.placed.append(placed)
        return placed

    def place(self, node: Node, call: Node) -> Tensor:
        """A tensor for an input: a new one at a new or an old address, or the old tensor itself."""
        slot = (call["slot"], node["name"])
        where = (node["offset"], node["shift"])
        before, placed, tensor = self.slots.get(slot, (where, None, None))
        if placed is None or tensor is None or call["place"] == "fresh" or before != where:
            placed, tensor = self.at(node), None
        else:
            self.placed.append(placed)
        if tensor is None or call["place"] != "same" or tensor.requires_grad != node["grad"]:
            tensor = placed.view().requires_grad_(node["grad"])
        tensor.grad = None
        self.slots[slot] = (where, placed, tensor)
        return tensor

    def run(self) -> Node:
        """The calls; if the judge wants to know which operators run, with their names."""
        if not self.prepared["trace"]:
            return self.go()
        found: list[Node] = []
        names = operators_of(lambda: found.append(self.go()))
        return {**found[0], "operators": names}

    def go(self) -> Node:
        """All calls, one after the other, or all forwards and then all backwards."""
        with self.device.aside(self.prepared["aside"]):
            return self.go_on_stream()

    def go_on_stream(self) -> Node:
        gradients, again = self.prepared["gradients"], self.prepared["empty"]
        answers: list[Node] = []
        for each in self.placed:
            each.stage()
        self.device.start(busy=self.prepared["busy"])
        for each in self.placed:
            each.load()
        for call in self.calls:
            answers.append(self.forward(call, gradients, again))
            if gradients and not self.prepared["twice"]:
                answers[-1]["gradients"] = self.backward(call, again)
        later = zip(self.calls, answers, strict=True) if self.prepared["twice"] else ()
        for call, answer in later if gradients else ():
            answer["gradients"] = self.backward(call, again)
        found: Node = {"calls": answers, "device": self.device.stop(self.results)}
        if self.device.is_separate:
            self.send_all(found)
        return found

    def results(self) -> Iterator[Tensor]:
        """All tensors that came out."""
        for call in self.calls:
            yield from call.leaves()
            yield from (each for each in call.gradients.values() if each is not None)

    def forward(self, call: Call, gradients: bool, again: bool) -> Node:
        node = call.node
        self.device.seed(node["seed"])
        if self.prepared["again"]:
            with torch.no_grad():
                self.model(*call.arguments)
        random = self.device.random_state()
        if not again:
            without = torch.inference_mode if node["how"] == "inference" else torch.no_grad
            with nullcontext() if gradients else without():
                call.outputs = self.model(*call.arguments)
        changed = not torch.equal(random, self.device.random_state())
        outputs = {} if self.device.is_separate else encoded(call.outputs, self.put)
        return {"outputs": outputs, "random": changed}

    def send_all(self, found: Node) -> None:
        """On a device the results are copied when the clock has stopped."""
        for call, answer in zip(self.calls, found["calls"], strict=True):
            answer["outputs"] = encoded(call.outputs, self.put)
            if "gradients" in answer:
                answer["gradients"] = self.sent_gradients(call, self.put)

    def backward(self, call: Call, again: bool) -> dict[str, Node | None]:
        """The gradients of all inputs and parameters that require one."""
        if not again:
            take_gradients(call, self.model, self.prepared["detached"])
        return {} if self.device.is_separate else self.sent_gradients(call, self.put)

    def report(self, request: Node) -> Node:
        """What else became of the last call."""
        for each in self.placed:
            each.store()
        self.freeze(())
        if self.prepared["keep"]:
            self.kept[self.prepared["id"]] = with_own_gradients(self.calls)
        names = self.prepared["attributes"]
        return {
            "shares": [self.shares(each) for each in self.calls],
            "buffers": {n: self.send(e) for k, n, e in held_tensors(self.model) if k == "buffer"},
            "attributes": {name: self.attribute(name) for name in names},
            "weights": self.weights_digest(),
            "damaged": [
                *(name for name, each in self.guards.items() if not each.is_intact),
                *self.device.damaged(),
            ],
            "state": {
                "before": self.before,
                "after": global_state(self.model),
                "replaced": self.replaced(),
            },
        }

    def optimizer_step(self, request: Node) -> Node:
        """Change the weights in place, as SGD does it, with the judge's gradients."""
        named = parameters_of(self.model)
        with torch.no_grad():
            for name, each in self.tensors(request["gradients"]).items():
                named[name].add_(each.to(named[name].device), alpha=-request["rate"])
        return {"weights": self.weights_digest()}

    def write(self, request: Node) -> Node:
        """New values in the parameters' own memory, as if another program wrote them."""
        named = parameters_of(self.model)
        for name, each in self.tensors(request["values"]).items():
            named[name].data.copy_(each)
        return {"weights": self.weights_digest()}

    def recall(self, request: Node) -> Node:
        """The results of earlier calls, as they are now."""
        found = {}
        for number in request["ids"]:
            found[number] = [
                {
                    "outputs": encoded(each.outputs, self.send),
                    "gradients": self.sent_gradients(each, self.send),
                }
                for each in self.kept.pop(number)
            ]
        return {"found": found}

    def restore(self, request: Node) -> None:
        """The buffers and the attributes that the model changes, as they are before each call."""
        restore_buffers(self.model, self.tensors(request["buffers"]))
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

    def shares(self, call: Call) -> dict[str, list[str]]:
        """For each output, the names of everything whose memory it shares."""
        earlier = [each for number, each in self.kept.items() if number != self.prepared["id"]]
        return shared_memory(call, self.model, [each for calls in earlier for each in calls])

    def sent_gradients(self, call: Call, send: OnTensor) -> dict[str, Node | None]:
        def sent(tensor: Tensor | None) -> Node | None:
            return None if tensor is None else encoded(tensor, send)

        return {name: sent(each) for name, each in call.gradients.items()}

    def weights_digest(self) -> str:
        named = parameters_of(self.model).items()
        if any(self.held.get(name) is not each for name, each in named):
            return "other tensor objects"
        return weights_digest(self.model)

    def put(self, tensor: Tensor) -> Node:
        """Copy a tensor to the judge's memory; without room there, it is sent."""
        if tensor.device.type != self.device.kind:
            return {"other": f"tensor on {tensor.device}"}
        values = dense(self.device.seen(tensor))
        size = self.arena.put(values, self.end) if not self.sent else -1
        if size < 0:
            return self.send(tensor, before=len(self.sizes))
        self.sizes.append(size)
        self.end += aligned(size)
        return described(tensor, len(self.sizes) - 1)

    def send(self, tensor: Tensor, before: int = 0) -> Node:
        if tensor.device.type != self.device.kind:
            return {"other": f"tensor on {tensor.device}"}
        self.sent.append(bytes_of(tensor))
        return described(tensor, before + len(self.sent) - 1)

    def tensor(self, node: Node) -> Tensor:
        found = tensor_of(self.blobs[node["tensor"]], node["dtype"], node["shape"])
        return found.to(node["device"])

    def tensors(self, nodes: Mapping[str, Node]) -> dict[str, Tensor]:
        return {name: self.tensor(node) for name, node in nodes.items()}

    def trees(self, nodes: Mapping[str, Node]) -> dict[str, Any]:
        return {name: self.tree(node) for name, node in nodes.items()}

    def tree(self, node: Node) -> Any:
        return decoded(node, self.tensor)
