"""The functions of one mode: inputs, guard, drivers, and the structure of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusewright.emit import python, steps
from fusewright.emit.bundle import ModuleBundle, ProgramPlans
from fusewright.emit.python import Scope, call, dims, filled, layout, mentions, quoted
from fusewright.emit.steps import view_lines
from fusewright.emit.wiring import FromInput, FromResult, Wiring
from fusewright.errors import GraphError
from fusewright.ir.graph import Binding, TensorSpec
from fusewright.plan.steps import Fused, Plan, View


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

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(symbol.name for symbol in self.plans.program.symbols)

    @property
    def main_input(self) -> int | None:
        """The first binding on the kernels' type of device. All others must be on its device."""
        kind = self.bundle.device_type
        inputs = self.plans.forward.inputs
        return next((i for i, each in enumerate(inputs) if _kind(each.spec) == kind), None)

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
            f"{symbol.name} = {variables[symbol.input_index]}.shape[{symbol.dim}]"
            for symbol in self.plans.program.symbols
            if mentions(body, symbol.name)
        ]
        if mentions(body, "device"):
            main, named = self.main_input, f'torch.device("{self.bundle.device_type}")'
            lines.append(f"device = {named if main is None else variables[main] + '.device'}")
        return lines


def _kind(spec: TensorSpec) -> str:
    return spec.device.split(":")[0]


@dataclass(frozen=True)
class Definition:
    """A function's text. Modes with the same text share the function."""

    kind: str
    parameters: Sequence[str]
    doc: str
    body: Sequence[str]

    @property
    def text(self) -> str:
        return "\n".join([*self.parameters, self.doc, *self.body])


def definitions(mode: Mode) -> list[Definition]:
    """All functions of one mode. Each is a field of the mode's record, named by its kind."""
    made = [_gather(mode), _misfit(mode), _outputs(mode), _layouts(mode)]
    made.append(_driver(mode, "inference"))
    backward = mode.plans.backward
    if backward is not None:
        made += [_driver(mode, "forward"), _backward(mode, backward)]
        made.append(_gradient_layouts(mode, backward))
    return made


def shortcuts(mode: Mode) -> list[str]:
    """Flags of the functions around the drivers that would return their arguments unchanged."""
    program, arguments = mode.plans.program, mode.bundle.arguments
    given = [(each.kind, each.path) for each in program.bindings]
    as_given = given == [("input", str(at)) for at in range(arguments.plain)]
    lone = program.output_tree == "o[0]" and mode.wiring.outputs == (FromResult(0),)
    return [name for name, holds in (("as_given", as_given), ("lone", lone)) if holds]


def _gather(mode: Mode) -> Definition:
    variables = mode.variables()
    owners: dict[tuple[str, ...], str] = {(): "module"}
    body: list[str] = []
    for variable, binding in zip(variables, mode.plans.program.bindings, strict=True):
        if binding.kind == "input":
            body.append(f"{variable} = leaves[{int(binding.path)}]")
        else:
            body += _fetch(variable, binding, owners)
    body += returned(variables)
    return Definition("gather", ["module", "leaves"], "The graph's inputs, in order.", body)


def _fetch(variable: str, binding: Binding, owners: dict[tuple[str, ...], str]) -> list[str]:
    """Read a parameter, buffer or attribute. Each owner is looked up once."""
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
    variables = mode.variables()
    mutated = {each.index for each in program.results if each.kind == "mutation"}
    checks: list[str] = []
    for index, (each, binding) in enumerate(zip(inputs, program.bindings, strict=True)):
        on_main = _kind(each.spec) == mode.bundle.device_type
        device = "device" if on_main else f'torch.device("{_kind(each.spec)}")'
        frozen = not binding.differentiable or (index in mutated and binding.kind == "input")
        args = [quoted(_label(binding)), variables[index], *layout(each.spec), device, str(frozen)]
        checks.append(f"_fw_misfit({', '.join(args)})")
    for guard in program.guards:
        checks.append(f"(None if {guard} else {quoted('the sizes break the rule ' + guard)})")
    body = _first_checks(mode, variables)
    body += mode.read_symbols(variables, checks)
    body += ["return (", *(f"    {'or ' if i else ''}{text}" for i, text in enumerate(checks)), ")"]
    doc = "Why these tensors are not what the kernels were written for; None when they are."
    return Definition("misfit", variables, doc, body if checks else ["return None"])


def _label(binding: Binding) -> str:
    return f"argument {binding.path}" if binding.kind == "input" else binding.path


def _first_checks(mode: Mode, variables: Sequence[str]) -> list[str]:
    """Checks that must come before a symbol or the device is read."""
    tests = []
    main, program, inputs = mode.main_input, mode.plans.program, mode.plans.forward.inputs
    sources = {symbol.input_index for symbol in program.symbols}
    for index in sorted(sources | ({main} if main is not None else set())):
        rank = len(inputs[index].spec.shape)
        text = quoted(f"{_label(program.bindings[index])} is not a tensor of {rank} dimensions")
        tests.append((f"_fw_rank({variables[index]}) != {rank}", text))
    if main is not None:
        kind, device = mode.bundle.device_type, f"{variables[main]}.device"
        tests.append((f'{device}.type != "{kind}"', f'"the tensors are not on a {kind} device"'))
        if mode.plans.has_tensor_core_steps:
            text = '"the device is not of compute capability 9.0"'
            tests.append((f"not _fw_tensor_cores({device}.index)", text))
    return [line for test, text in tests for line in (f"if {test}:", f"    return {text}")]


def _driver(mode: Mode, kind: str) -> Definition:
    """The forward driver, or the inference driver without the values for backward."""
    plan = mode.plans.forward if kind == "forward" else mode.plans.inference
    found = steps.demands(plan, one_by_one=False)
    scope = mode.scope(plan)
    count = len(mode.wiring.results) if kind == "forward" else mode.wiring.n_inference
    values = [plan.outputs[position] for position in mode.wiring.results[:count]]
    kept = frozenset(each.name for each in plan.inputs) | frozenset(map(str, values))
    laid_out = steps.read_by_loops(plan, map(str, values[mode.wiring.n_inference :]))
    body = steps.step_lines(plan, found, scope, mode.wrappers, laid_out, kept)
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
        given.append(text)
    variables = [scope[each.name] for each in plan.inputs]
    body = mode.read_symbols(variables, body) + body + returned(given)
    doc = "The forward graph, step by step."
    parameters = [*variables, *([f"{steps.IN_PLACE}=False"] if mode.wiring.mutations else [])]
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
    tree = mode.plans.program.output_tree
    symbols = mode.read_symbols([f"tensors[{i}]" for i in range(len(plan.inputs))], [*body, *items])
    given = [f"o = [{', '.join(items)}]", f"return {tree}"]
    given = [f"return {items[0]}"] if tree == "o[0]" else given
    doc = "The module's result as the original returns it."
    return Definition("outputs", ["tensors", "results"], doc, [*symbols, *body, *given])


def _through(
    mode: Mode, plan: Plan, index: int, views: Sequence[View], stem: str
) -> tuple[list[str], str]:
    """Lines that apply `views` to binding `index`, and the variable of the last view."""
    names = {plan.inputs[index].name: f"tensors[{index}]"}
    lines: list[str] = []
    for depth, view in enumerate(views):
        names[view.name] = f"{stem}_{depth}"
        lines += view_lines(view, Scope(names, mode.bundle.device_type))
    return lines, list(names.values())[-1]


def _layouts(mode: Mode) -> Definition:
    plan, variables = mode.plans.forward, mode.variables()
    lines = _layout_lines(plan, [plan.outputs[i] for i in mode.wiring.results])
    doc = "The dtype, shape and strides of each result."
    return Definition("layouts", variables, doc, [*mode.read_symbols(variables, lines), *lines])


def _layout_lines(plan: Plan, values: Sequence[object]) -> list[str]:
    specs = {**dict(plan.specs), **{each.name: each.spec for each in plan.inputs}}
    names = [value if isinstance(value, str) else "" for value in values]
    items = [f"({', '.join(layout(specs[name]))})" if name else "None" for name in names]
    return ["return (", *(f"    {item}," for item in items), ")"]


def _backward(mode: Mode, plan: Plan) -> Definition:
    """The backward driver. Its `values` are the saved tensors, then the tangents."""
    found = steps.demands(plan, one_by_one=True)
    scope = mode.scope(plan)
    n_saved = len(mode.wiring.saved)
    if len(plan.inputs) != n_saved + len(mode.wiring.tangents):
        raise GraphError("the inputs of the backward graph are not its saved values and tangents")
    taken, prologue = _saved(mode, plan, scope)
    read = steps.read_by_loops(plan)
    for each in plan.inputs[:n_saved]:
        if each.name in read and taken.get(each.name):
            strides = dims(each.spec.strides)
            prologue.append(f"{scope[each.name]} = _fw_laid_out({scope[each.name]}, {strides})")
    tangents = plan.inputs[n_saved:]
    for each in tangents:
        args = [scope[each.name], *layout(each.spec), "device"]
        prologue += call(scope[each.name], "_fw_tangent", args)
    kept = frozenset(output for output in plan.outputs if isinstance(output, str))
    body = [*prologue, *steps.step_lines(plan, found, scope, mode.wrappers, read, kept)]
    body += returned(_gradients(plan, found, scope))
    variables = [*dict.fromkeys(v for v in taken.values() if v), *(scope[t.name] for t in tangents)]
    start = filled("[", variables, "] = values")
    start.append("values.clear()  # the caller's hold on them: what is deleted below is free")
    if any(mentions(body, symbol) for symbol in mode.symbols):
        start.append(f"[{', '.join(mode.symbols)}] = sizes")
    doc = "The backward graph: a gradient per input, None for those not in `need`."
    parameters = ["values", "sizes", "device", "need"]
    return Definition("backward", parameters, doc, [*start, *body])


def returned(items: Sequence[str]) -> list[str]:
    """The statement that returns a tuple."""
    return filled("return (", [f"{item}," for item in items] if len(items) == 1 else items, ")")


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


def _gradient_layouts(mode: Mode, plan: Plan) -> Definition:
    doc, lines = "The dtype, shape and strides of each gradient.", _layout_lines(plan, plan.outputs)
    return Definition("gradient_layouts", list(mode.symbols), doc, lines)
