"""The functions of one mode: gather, guard, the drivers, the user's structure, and their record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusewright.emit.bundle import ModuleBundle, ProgramPlans
from fusewright.emit.python import (
    Scope,
    call,
    dims,
    dtype,
    escaped,
    filled,
    identifiers,
    layout,
    mentions,
    quoted,
)
from fusewright.emit.steps import (
    IN_PLACE,
    Demands,
    WrapperCall,
    demands,
    literals_of,
    names_of,
    read_by_loops,
    step_lines,
    view_lines,
)
from fusewright.emit.wiring import FromInput, FromResult, Wiring
from fusewright.errors import GraphError
from fusewright.ir.graph import Binding, TensorSpec
from fusewright.plan.steps import Fused, Plan, View


@dataclass(frozen=True)
class Mode:
    """One program of a bundle with all that its functions are written from."""

    bundle: ModuleBundle
    plans: ProgramPlans
    wiring: Wiring
    wrappers: Mapping[Fused, WrapperCall]

    @property
    def name(self) -> str:
        return self.plans.name

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(symbol.name for symbol in self.plans.program.symbols)

    @property
    def main_input(self) -> int | None:
        """The first binding on the kernels' kind of device: where everything else has to be."""
        kind = self.bundle.device_type
        inputs = self.plans.forward.inputs
        return next((i for i, each in enumerate(inputs) if _kind(each.spec) == kind), None)

    def scope(self, plan: Plan, extra: Iterable[str] = ()) -> Scope:
        return Scope(identifiers([*names_of(plan), *extra], self.symbols), self.bundle.device_type)

    def read_symbols(self, variables: Sequence[str], body: Sequence[str]) -> list[str]:
        """Lines that read the symbols and the device which `body` mentions."""
        lines = [
            f"{symbol.name} = {variables[symbol.input_index]}.shape[{symbol.dim}]"
            for symbol in self.plans.program.symbols
            if mentions(body, symbol.name)
        ]
        if mentions(body, "device"):
            lines.append(f"device = {self.device_of(variables)}")
        return lines

    def device_of(self, variables: Sequence[str]) -> str:
        if self.main_input is None:
            return f'torch.device("{self.bundle.device_type}")'
        return f"{variables[self.main_input]}.device"


def _kind(spec: TensorSpec) -> str:
    return spec.device.split(":")[0]


@dataclass(frozen=True)
class Definition:
    """A function to write; two modes whose functions are alike share one."""

    kind: str
    parameters: Sequence[str]
    doc: str
    body: Sequence[str]

    @property
    def text(self) -> str:
        return "\n".join([*self.parameters, self.doc, *self.body])


def definitions(mode: Mode) -> list[Definition]:
    """Every function of one mode; each is a field of the mode's record, by its kind."""
    made = [
        _gather(mode),
        _misfit(mode),
        _outputs(mode),
        _layouts(mode),
        _driver(mode, "inference"),
    ]
    if mode.plans.backward is not None:
        made += [_driver(mode, "forward"), _backward(mode, mode.plans.backward)]
        made.append(_gradient_layouts(mode, mode.plans.backward))
    return made


def shortcuts(mode: Mode) -> list[str]:
    """Which of the functions around the drivers would hand on what they are given."""
    program, arguments = mode.plans.program, mode.bundle.arguments
    given = [(each.kind, each.path) for each in program.bindings]
    as_given = given == [("input", str(at)) for at in range(arguments.plain)]
    lone = program.output_tree == "o[0]" and mode.wiring.outputs == (FromResult(0),)
    return [name for name, holds in (("as_given", as_given), ("lone", lone)) if holds]


def _gather(mode: Mode) -> Definition:
    program = mode.plans.program
    scope = mode.scope(mode.plans.forward)
    variables = [scope[each.name] for each in mode.plans.forward.inputs]
    owners: dict[tuple[str, ...], str] = {(): "module"}
    body: list[str] = []
    for variable, binding in zip(variables, program.bindings, strict=True):
        if binding.kind == "input":
            body.append(f"{variable} = leaves[{int(binding.path)}]")
        else:
            body += _fetch(variable, binding, owners)
    body += returned(variables)
    return Definition("gather", ["module", "leaves"], "The graph's inputs, in order.", body)


def _fetch(variable: str, binding: Binding, owners: dict[tuple[str, ...], str]) -> list[str]:
    """Read a parameter, buffer or attribute; its owner is looked up once."""
    path = tuple(binding.path.split("."))
    if binding.kind == "constant":
        names = "".join(quoted(name) + ", " for name in path)
        return [f"{variable} = _fw_attribute(module, ({names.rstrip(' ')}))"]
    lines = []
    for depth in range(1, len(path)):
        if path[:depth] not in owners:
            owners[path[:depth]] = f"fw_owner_{len(owners)}"
            parent, own = owners[path[: depth - 1]], owners[path[:depth]]
            lines.append(f"{own} = {parent}._modules.get({quoted(path[depth - 1])}, _FwGone)")
    kind = "_parameters" if binding.kind == "parameter" else "_buffers"
    lines.append(f"{variable} = {owners[path[:-1]]}.{kind}.get({quoted(path[-1])})")
    return lines


def _misfit(mode: Mode) -> Definition:
    program, inputs = mode.plans.program, mode.plans.forward.inputs
    scope = mode.scope(mode.plans.forward)
    variables = [scope[each.name] for each in inputs]
    mutated = {each.index for each in program.results if each.kind == "mutation"}
    checks: list[str] = []
    for index, (each, binding) in enumerate(zip(inputs, program.bindings, strict=True)):
        on_main = _kind(each.spec) == mode.bundle.device_type
        device = "device" if on_main else f'torch.device("{_kind(each.spec)}")'
        frozen = not binding.differentiable or (index in mutated and binding.kind == "input")
        label = f"argument {binding.path}" if binding.kind == "input" else binding.path
        args = f"{quoted(label)}, {variables[index]}, {layout(each.spec)}, {device}, {frozen}"
        checks.append(f"_fw_misfit({args})")
    for guard in program.guards:
        checks.append(f"(None if {guard} else {quoted('the sizes break the rule ' + guard)})")
    body = _first_checks(mode, variables)
    body += mode.read_symbols(variables, checks)
    body += ["return (", *(f"    {'or ' if i else ''}{text}" for i, text in enumerate(checks)), ")"]
    doc = "Why these tensors are not what the kernels were written for; None when they are."
    return Definition("misfit", variables, doc, body if checks else ["return None"])


def _first_checks(mode: Mode, variables: Sequence[str]) -> list[str]:
    """What must hold before a symbol or the device can be read at all."""
    lines = []
    inputs = mode.plans.forward.inputs
    sources = {symbol.input_index for symbol in mode.plans.program.symbols}
    sources |= {mode.main_input} if mode.main_input is not None else set()
    for index in sorted(sources):
        rank = len(inputs[index].spec.shape)
        binding = mode.plans.program.bindings[index]
        label = f"argument {binding.path}" if binding.kind == "input" else binding.path
        text = quoted(f"{label} is not a tensor of {rank} dimensions")
        lines += [f"if _fw_rank({variables[index]}) != {rank}:", f"    return {text}"]
    if mode.main_input is not None:
        kind = mode.bundle.device_type
        lines += [
            f'if {variables[mode.main_input]}.device.type != "{kind}":',
            f'    return "the tensors are not on a {kind} device"',
        ]
        if mode.plans.has_products:
            lines += [
                f"if not _fw_tensor_cores({variables[mode.main_input]}.device.index):",
                '    return "the device is not of compute capability 9.0"',
            ]
    return lines


def _driver(mode: Mode, kind: str) -> Definition:
    """The forward driver, or the inference driver without the values for backward."""
    plan = mode.plans.forward if kind == "forward" else mode.plans.inference
    found = demands(plan, one_by_one=False)
    scope = mode.scope(plan)
    count = len(mode.wiring.results) if kind == "forward" else mode.wiring.n_inference
    positions = mode.wiring.results[:count]
    values = [plan.outputs[position] for position in positions]
    kept = frozenset(each.name for each in plan.inputs) | frozenset(map(str, values))
    laid_out = read_by_loops(plan, map(str, values[mode.wiring.n_inference :]))
    body = step_lines(plan, found, scope, mode.wrappers, laid_out, kept)
    views = {step.name for step in plan.steps if isinstance(step, View)}
    literals = {node.name for node in literals_of(plan)}
    given = []
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise GraphError(f"result {index} of the {kind} graph is {value}, not a tensor")
        text = scope[value]
        if index in mode.wiring.clones or value in literals:
            text += ".clone()"  # ours to keep, or about to be overwritten
        elif index < mode.wiring.n_outputs and value in views:
            text += ".detach()"  # the caller may change an output in place, but not a view
        given.append(text)
    variables = [scope[each.name] for each in plan.inputs]
    body = mode.read_symbols(variables, body) + body + returned(given)
    doc = "The forward graph, step by step."
    parameters = [*variables, *([f"{IN_PLACE}=False"] if mode.wiring.mutations else [])]
    return Definition(kind, parameters, doc, body)


def _outputs(mode: Mode) -> Definition:
    plan = mode.plans.forward
    items: list[str] = []
    body: list[str] = []
    for position, origin in enumerate(mode.wiring.outputs):
        match origin:
            case FromResult(index):
                items.append(f"results[{index}]")
            case FromInput(index, views):
                lines, text = _through(mode, plan, index, views, f"view_{position}")
                body += lines
                items.append(text + (".detach()" if position in mode.wiring.detached else ""))
            case _:
                items.append(str(origin))
    tree = escaped(mode.plans.program.output_tree)
    symbols = mode.read_symbols([f"tensors[{i}]" for i in range(len(plan.inputs))], [*body, *items])
    given = [f"o = [{', '.join(items)}]", f"return {tree}"]
    if tree == "o[0]":
        given = [f"return {items[0]}"]
    body = [*symbols, *body, *given]
    doc = "The module's result as the original returns it."
    return Definition("outputs", ["tensors", "results"], doc, body)


def _through(
    mode: Mode, plan: Plan, index: int, views: Sequence[View], stem: str
) -> tuple[list[str], str]:
    """Lines that look at binding `index` through `views`, and the variable of the last."""
    names = {plan.inputs[index].name: f"tensors[{index}]"}
    lines: list[str] = []
    for depth, view in enumerate(views):
        names[view.name] = f"{stem}_{depth}"
        lines += view_lines(view, Scope(names, mode.bundle.device_type))
    return lines, list(names.values())[-1]


def _layouts(mode: Mode) -> Definition:
    plan = mode.plans.forward
    specs = {**dict(plan.specs), **{each.name: each.spec for each in plan.inputs}}
    scope = mode.scope(plan)
    variables = [scope[each.name] for each in plan.inputs]
    lines = [f"    ({layout(specs[str(plan.outputs[i])])})," for i in mode.wiring.results]
    body = [*mode.read_symbols(variables, lines), "return (", *lines, ")"]
    doc = "The dtype, shape and strides of each result."
    return Definition("layouts", variables, doc, body)


def _backward(mode: Mode, plan: Plan) -> Definition:
    """The backward driver: `values` are the saved tensors, then the tangents."""
    found = demands(plan, one_by_one=True)
    scope = mode.scope(plan)
    n_saved = len(mode.wiring.saved)
    if len(plan.inputs) != n_saved + len(mode.wiring.tangents):
        raise GraphError("the backward graph's inputs are not its saved values and tangents")
    taken, prologue = _saved(mode, plan, scope)
    read = read_by_loops(plan)
    for each in plan.inputs[:n_saved]:
        if each.name in read and taken.get(each.name):
            strides = dims(each.spec.strides)
            prologue.append(f"{scope[each.name]} = _fw_laid_out({scope[each.name]}, {strides})")
    tangents = plan.inputs[n_saved:]
    for each in tangents:
        args = [scope[each.name], *layout_args(each.spec), "device"]
        prologue += call(scope[each.name], "_fw_tangent", args)
    kept = frozenset(output for output in plan.outputs if isinstance(output, str))
    steps = step_lines(plan, found, scope, mode.wrappers, read, kept)
    body = [*prologue, *steps, *returned(_gradients(plan, found, scope))]
    variables = [*dict.fromkeys(v for v in taken.values() if v), *(scope[t.name] for t in tangents)]
    start = filled("[", variables, "] = values")
    start.append("values.clear()  # the caller's hold on them: what is deleted below is free")
    if any(mentions(body, symbol) for symbol in mode.symbols):
        start.append(f"[{', '.join(mode.symbols)}] = sizes")
    doc = "The backward graph: a gradient per input, None for those not in `need`."
    parameters = ["values", "sizes", "device", "need"]
    return Definition("backward", parameters, doc, [*start, *body])


def returned(items: Sequence[str]) -> list[str]:
    """A return of a tuple."""
    return filled("return (", [f"{item}," for item in items] if len(items) == 1 else items, ")")


def layout_args(spec: TensorSpec) -> list[str]:
    return [dtype(spec.dtype), dims(spec.shape), dims(spec.strides)]


def _saved(mode: Mode, plan: Plan, scope: Scope) -> tuple[dict[str, str], list[str]]:
    """For each saved value the variable it arrives in (none for a size), and lines that form it."""
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
    """For each saved value its place among bindings and results, None for a size."""
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


def _gradients(plan: Plan, found: Demands, scope: Scope) -> list[str]:
    texts = []
    for position, output in enumerate(plan.outputs):
        if not isinstance(output, str):
            texts.append("None")
        elif found.of[output] == found.everything and found.everything == {position}:
            texts.append(scope[output])
        else:
            texts.append(f"{scope[output]} if need[{position}] else None")
    return texts


def _gradient_layouts(mode: Mode, plan: Plan) -> Definition:
    specs = {**dict(plan.specs), **{each.name: each.spec for each in plan.inputs}}
    lines = [
        f"    ({layout(specs[output])})," if isinstance(output, str) else "    None,"
        for output in plan.outputs
    ]
    body = ["return (", *lines, ")"]
    doc = "The dtype, shape and strides of each gradient."
    return Definition("gradient_layouts", list(mode.symbols), doc, body)
