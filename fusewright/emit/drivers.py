"""The drivers of one mode: forward, inference and backward, as straight-line Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fusewright.emit import python, steps
from fusewright.emit.bundle import ModuleBundle, ProgramPlans
from fusewright.emit.joined import Part, joined
from fusewright.emit.python import (
    Scope,
    call,
    device_kind,
    dims,
    layout,
    mentions,
    returned,
    row,
    size,
)
from fusewright.emit.steps import view_lines
from fusewright.emit.wiring import FromInput, FromResult, Wiring
from fusewright.errors import GraphError
from fusewright.plan.steps import Fused, Plan, View

# Stand for the names of the mode's table of saved layouts, and of its forward.
SAVED, FORWARD = "_SAVED_", "_FORWARD_"


@dataclass(frozen=True)
class Mode:
    """One program of a bundle, and the input of its functions' text."""

    bundle: ModuleBundle
    plans: ProgramPlans
    wiring: Wiring
    wrappers: Mapping[Fused, steps.WrapperCall]

    @property
    def name(self) -> str:
        return self.plans.name

    @cached_property
    def demands(self) -> Mapping[str, tuple[Plan, steps.Demands]]:
        """The plans with a driver of their own, each with the demands for its values."""
        return demands(self.plans, self.wiring)

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(symbol.name for symbol in self.plans.program.symbols)

    @property
    def main_input(self) -> int | None:
        """The first binding on the kernels' type of device. All others must be on its device."""
        kind = self.bundle.device_type
        inputs = self.plans.forward.inputs
        return next((i for i, each in enumerate(inputs) if device_kind(each.spec) == kind), None)

    def scope(self, plan: Plan) -> Scope:
        names = python.identifiers(steps.names_of(plan), self.symbols)
        return Scope(names, self.bundle.device_type)

    def variables(self) -> list[str]:
        """The variables of the graph's inputs."""
        scope = self.scope(self.plans.forward)
        return [scope[each.name] for each in self.plans.forward.inputs]

    def read_symbols(self, variables: Sequence[str], body: Sequence[str]) -> list[str]:
        """Lines that read the symbols and the device that `body` uses."""
        lines = [
            f"{symbol.name} = {size(symbol, variables[symbol.input_index])}"
            for symbol in self.plans.program.symbols
            if mentions(body, symbol.name)
        ]
        if mentions(body, "device"):
            main, named = self.main_input, f'torch.device("{self.bundle.device_type}")'
            lines.append(f"device = {named if main is None else variables[main] + '.device'}")
        return lines


@dataclass(frozen=True)
class Definition:
    """A function's text. Modes with the same text share the function. If it is `plain`, it says
    nothing about the model."""

    kind: str
    parameters: Sequence[str]
    doc: str
    body: Sequence[str]
    plain: bool = False

    @property
    def text(self) -> str:
        return "\n".join([*self.parameters, self.doc, *self.body])


def demands(plans: ProgramPlans, wiring: Wiring) -> Mapping[str, tuple[Plan, steps.Demands]]:
    """The plans that get a driver, by its kind, with the demands for their values.

    Where inference and forward have much in common, one driver does both.
    """
    alone = steps.demands(plans.inference, one_by_one=False)
    found = {"inference": (plans.inference, alone)}
    if plans.backward is None:
        return found
    found["forward"] = plans.forward, steps.demands(plans.forward, one_by_one=False)
    results = wiring.results
    parts = [Part(*found[kind], results[: wiring.n_inference]) for kind in ("forward", "inference")]
    both = None if plans.has_layers else joined(*parts)
    found = found if both is None else {"forward": both}
    return {**found, "backward": (plans.backward, steps.demands(plans.backward, one_by_one=True))}


def drivers(mode: Mode) -> list[Definition]:
    """The functions that compute. Each is a field of the mode's record, named by its kind."""
    backward = mode.plans.backward
    if backward is None:
        return [_driver(mode, "inference")]
    own = "inference" in mode.demands
    inference = _driver(mode, "inference") if own else _by_forward(mode)
    return [_driver(mode, "forward"), inference, *_backward(mode, backward)]


def _by_forward(mode: Mode) -> Definition:
    """Inference as a call of forward."""
    body = [f"return {FORWARD}(*tensors, {steps.SAVES}=False)[:{mode.wiring.n_inference}]"]
    return Definition("inference", ["*tensors"], _DOCS["inference"], body, plain=True)


_DOCS = {
    "inference": "The model without gradients, step by step.",
    "forward": "The outputs, then the values that backward reads.",
    "both": "The outputs, then the values that backward reads; without gradients, not `saves`.",
    "backward": "A gradient for each input of forward, None for those not in `need`.",
    "saved": "The layouts in which backward reads its values; None for any.",
}


def _driver(mode: Mode, kind: str) -> Definition:
    """The forward driver, or the inference driver without the values for backward."""
    plan, found = mode.demands[kind]
    both = bool(found.apart)
    scope = mode.scope(plan)
    count = len(mode.wiring.results) if kind == "forward" else mode.wiring.n_inference
    values = [plan.outputs[position] for position in mode.wiring.results[:count]]
    kept = frozenset(each.name for each in plan.inputs) | frozenset(map(str, values))
    laid_out = steps.read_by_loops(plan, map(str, values[mode.wiring.n_inference :]))
    n_inference = mode.wiring.n_inference
    saved = frozenset(map(str, values[n_inference:])) if both else frozenset[str]()
    freed = saved - {each.name for each in plan.inputs} - set(map(str, values[:n_inference]))
    lines = steps.step_lines(plan, found, scope, mode.wrappers, laid_out, kept, freed)
    body = steps.without_last_deletions(lines)
    defined = steps.always_defined(plan, found)
    views = {step.name for step in plan.steps if isinstance(step, View)}
    literals = {node.name for node in steps.literals_of(plan)}
    given = []
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise GraphError(f"result {index} of the {kind} graph is not a tensor but {value}")
        text = scope[value]
        if index in mode.wiring.clones or value in literals:
            text += ".clone()"  # We keep the original, or overwrite it.
        elif index < mode.wiring.n_outputs and value in views:
            text += ".detach()"  # The caller may change an output in place, but not a view.
        if value in saved and not (value in defined and text == scope[value]):
            text += f" if {steps.SAVES} else None"
        given.append(text)
    variables = [scope[each.name] for each in plan.inputs]
    body = mode.read_symbols(variables, body) + body + returned(given)
    parameters = [*variables, *([f"{steps.IN_PLACE}=False"] if mode.wiring.mutations else [])]
    parameters += [f"{steps.SAVES}=True"] if both else []
    return Definition(kind, parameters, _DOCS["both" if both else kind], body)


def _backward(mode: Mode, plan: Plan) -> list[Definition]:
    """The table of layouts, and the driver. Its `values` are the saved tensors, then the
    tangents."""
    _, found = mode.demands["backward"]
    scope = mode.scope(plan)
    n_saved = len(mode.wiring.saved)
    if len(plan.inputs) != n_saved + len(mode.wiring.tangents):
        raise GraphError("the inputs of the backward graph are not its saved values and tangents")
    taken, prologue = _saved(mode, plan, scope)
    read = steps.read_by_loops(plan)
    layouts = dict.fromkeys((variable for variable in taken.values() if variable), "None")
    for each in plan.inputs[:n_saved]:
        name = scope[each.name]
        if each.name in read and taken.get(each.name) == name:
            layouts[name] = dims(each.spec.strides)
        elif each.name in read and taken.get(each.name):
            prologue += call(name, "_fw_laid_out", [name, dims(each.spec.strides)])
    tangents = {
        scope[each.name]: row(layout(each.spec, mode.bundle.device_type))
        for each in plan.inputs[n_saved:]
    }
    kept = frozenset(output for output in plan.outputs if isinstance(output, str))
    kept |= _module_tensors(mode, plan)
    body = [*prologue, *steps.step_lines(plan, found, scope, mode.wrappers, read, kept)]
    body += returned(_gradients(plan, found, scope))
    table = [f"return {row([*layouts.values(), *tangents.values()])}"]
    given = [f"[{', '.join([*layouts, *tangents])}] = _fw_taken(values, {SAVED}(*sizes), device)"]
    if any(mentions(body, symbol) for symbol in mode.symbols):
        given.append(f"[{', '.join(mode.symbols)}] = sizes")
    saved = Definition("saved", list(mode.symbols), _DOCS["saved"], table)
    parameters = ["values", "sizes", "device", "need"]
    driver = [*given, *found.definitions(body), *body]
    return [saved, Definition("backward", parameters, _DOCS["backward"], driver)]


def _module_tensors(mode: Mode, plan: Plan) -> frozenset[str]:
    """Saved parameters and buffers: the module holds them, so that deleting one frees nothing."""
    bindings = mode.plans.program.bindings
    pairs = zip(plan.inputs, mode.wiring.saved, strict=False)
    return frozenset(
        each.name
        for each, origin in pairs
        if isinstance(origin, FromInput) and bindings[origin.index].kind in ("parameter", "buffer")
    )


def _saved(mode: Mode, plan: Plan, scope: Scope) -> tuple[dict[str, str], list[str]]:
    """The variable that brings each saved value (none for a size), and lines that compute it."""
    held: dict[int, str] = {}
    taken: dict[str, str] = {}
    lines: list[str] = []
    for each, origin, slot in zip(plan.inputs, mode.wiring.saved, saved_slots(mode), strict=False):
        name = scope[each.name]
        if slot is None:
            taken[each.name] = ""
            lines.append(f"{name} = {origin}")
            continue
        views = origin.views if isinstance(origin, FromInput) else ()
        if slot not in held:
            held[slot] = f"fw_held_{slot}" if views else name
        taken[each.name] = held[slot]
        inner = {next(iter(view.node.refs())): f"fw_{name}_{i}" for i, view in enumerate(views)}
        inner |= {views[0].node.refs()[0]: held[slot]} if views else {}
        for view in views:
            target = inner.get(view.name, name)
            lines += view_lines(view, Scope({**inner, view.name: target}, scope.device_type))
        if not views and held[slot] != name:
            lines.append(f"{name} = {held[slot]}")
    return taken, lines


def saved_slots(mode: Mode) -> list[int | None]:
    """For each saved value its index in the bindings and results, None for a size."""
    n_bindings = len(mode.plans.program.bindings)
    slots: list[int | None] = []
    for origin in mode.wiring.saved:
        match origin:
            case FromInput(index, _):
                slots.append(index)
            case FromResult(index):
                slots.append(n_bindings + index)
            case _:
                slots.append(None)
    return slots


def _gradients(plan: Plan, found: steps.Demands, scope: Scope) -> list[str]:
    texts = []
    for position, output in enumerate(plan.outputs):
        if not isinstance(output, str):
            texts.append("None")
        elif found.of[output] == found.everything and found.everything == {position}:
            texts.append(scope[output])
        else:
            texts.append(f"{scope[output]} if need[{position}] else None")
    return texts
