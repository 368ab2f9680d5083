"""What surrounds the drivers of a mode: its inputs, guards, outputs and layouts, and its record.

These are the tables and small functions that the run time reads. A reader of an emitted file does
not need them, so they come with the support code.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from fusewright.emit import python
from fusewright.emit.bundle import Owner
from fusewright.emit.drivers import Definition, Mode, saved_slots
from fusewright.emit.facts import bound_paths, checked_tensors, without_checks
from fusewright.emit.python import (
    Scope,
    constant,
    device_kind,
    dims,
    dtype,
    layout,
    quoted,
    returned,
    row,
    size,
)
from fusewright.emit.steps import view_lines
from fusewright.emit.wiring import FromInput, FromResult
from fusewright.emit.wrap import is_enclosed
from fusewright.ir.graph import Binding, Program, contiguous_strides
from fusewright.plan.steps import Plan, View

# Stand for the names of the mode's tables.
INPUTS, DIGEST = "_INPUTS_", "_DIGEST_OF_TEXT_"
# Tuples of so many numbers are written in a shorter form.
LONG = 16


def tables(mode: Mode) -> list[Definition]:
    """The functions around the drivers, named by their kind. Modes with equal ones share them."""
    made = [_inputs(mode), _gather(mode), _misfit(mode), _outputs(mode), _layouts(mode)]
    if mode.plans.backward is not None:
        made.append(_gradient_layouts(mode, mode.plans.backward))
    return made


def _inputs(mode: Mode) -> Definition:
    """A row for each input: label, dtype, shape, strides unless contiguous, whether a gradient is
    refused, and the kind of device unless it is the kernels'."""
    program, inputs = mode.plans.program, mode.plans.forward.inputs
    mutated = {each.index for each in program.results if each.kind == "mutation"}
    rows = []
    for index, (each, binding) in enumerate(zip(inputs, program.bindings, strict=True)):
        spec = each.spec
        frozen = not binding.differentiable or (index in mutated and binding.kind == "input")
        plain = spec.strides == contiguous_strides(spec.shape)
        fields = [quoted(_label(binding)), dtype(spec.dtype), dims(spec.shape)]
        fields += ["None" if plain else dims(spec.strides), str(frozen)]
        fields += (
            [] if device_kind(spec) == mode.bundle.device_type else [quoted(device_kind(spec))]
        )
        rows.append(row(fields))
    doc = "For each input: name, dtype, shape, strides, and whether it may need no gradient."
    return Definition("inputs", list(mode.symbols), doc, returned(rows))


def _gather(mode: Mode) -> Definition:
    owners: dict[tuple[str, ...], str] = {(): "module"}
    body: list[str] = []
    items = [_fetched(binding, owners, body) for binding in mode.plans.program.bindings]
    doc = "The graph's inputs, in order."
    return Definition("gather", ["module", "leaves"], doc, [*body, *returned(items)])


def _fetched(binding: Binding, owners: dict[tuple[str, ...], str], lines: list[str]) -> str:
    """An argument, parameter, buffer or attribute. Each owner is looked up once, in `lines`."""
    if binding.kind == "input":
        return f"leaves[{int(binding.path)}]"
    path = tuple(binding.path.split("."))
    if binding.kind == "constant":
        return f"_fw_attribute(module, {row(map(quoted, path))})"
    for depth in range(1, len(path)):
        if path[:depth] not in owners:
            owners[path[:depth]] = f"m{len(owners)}"
            parent, own = owners[path[: depth - 1]], owners[path[:depth]]
            lines.append(f"{own} = {parent}._modules.get({quoted(path[depth - 1])}, _FwGone)")
    kind = "_parameters" if binding.kind == "parameter" else "_buffers"
    return f"{owners[path[:-1]]}.{kind}.get({quoted(path[-1])})"


def _misfit(mode: Mode) -> Definition:
    program, main = mode.plans.program, mode.main_input
    body = _first_checks(mode)
    body += [
        f"{symbol.name} = {size(symbol, f'tensors[{symbol.input_index}]')}"
        for symbol in program.symbols
    ]
    device = f'torch.device("{mode.bundle.device_type}")'
    device = device if main is None else f"tensors[{main}].device"
    found = f"_fw_misfits(tensors, {INPUTS}({', '.join(mode.symbols)}), {device})"
    if mode.plans.guards:
        body.append(f"reason = {found}")
        found = "reason"
    for guard in mode.plans.guards:
        words = quoted(f"the sizes break the rule {guard}")
        test = guard if is_enclosed(guard) else f"({guard})"
        body += [f"if reason is None and not {test}:", f"    reason = {words}"]
    body.append(f"return {found}")
    doc = "Why these tensors are not what the kernels were written for; None when they are."
    return Definition("misfit", ["*tensors"], doc, body)


def _label(binding: Binding) -> str:
    return f"argument {binding.path}" if binding.kind == "input" else binding.path


def _first_checks(mode: Mode) -> list[str]:
    """Checks that must come before a symbol or the device is read."""
    tests = []
    main, program, inputs = mode.main_input, mode.plans.program, mode.plans.forward.inputs
    sources = {symbol.input_index for symbol in program.symbols}
    for index in sorted(sources | ({main} if main is not None else set())):
        rank = len(inputs[index].spec.shape)
        text = quoted(f"{_label(program.bindings[index])} is not a tensor of {rank} dimensions")
        tests.append((f"_fw_rank(tensors[{index}]) != {rank}", text))
    if main is not None:
        kind, device = mode.bundle.device_type, f"tensors[{main}].device"
        tests.append((f'{device}.type != "{kind}"', f'"the tensors are not on a {kind} device"'))
        if mode.plans.has_tensor_core_steps:
            text = '"the device is not of compute capability 9.0"'
            tests.append((f"not _fw_tensor_cores({device}.index)", text))
    return [line for test, text in tests for line in (f"if {test}:", f"    return {text}")]


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
    variables = [f"tensors[{i}]" for i in range(len(plan.inputs))]
    symbols = mode.read_symbols(variables, [*body, *items, tree])
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
    plan = mode.plans.forward
    lines = _layout_lines(mode, plan, [plan.outputs[i] for i in mode.wiring.results])
    variables = [f"tensors[{i}]" for i in range(len(plan.inputs))]
    doc = "The layout of each result: dtype, shape, strides, and its device if that is another."
    return Definition("layouts", ["*tensors"], doc, [*mode.read_symbols(variables, lines), *lines])


def _gradient_layouts(mode: Mode, plan: Plan) -> Definition:
    doc, lines = "The layout of each gradient.", _layout_lines(mode, plan, plan.outputs)
    return Definition("gradient_layouts", list(mode.symbols), doc, lines)


def _layout_lines(mode: Mode, plan: Plan, values: Sequence[object]) -> list[str]:
    specs = {**dict(plan.specs), **{each.name: each.spec for each in plan.inputs}}
    names = [value if isinstance(value, str) else "" for value in values]
    kind = mode.bundle.device_type
    return returned([row(layout(specs[name], kind)) if name else "None" for name in names])


def record(mode: Mode, functions: Mapping[str, str], owners: str) -> dict[str, str]:
    """The fields of the mode's `_FwMode`, without those that have their usual values."""
    bundle, program, wiring = mode.bundle, mode.plans.program, mode.wiring
    arguments = bundle.arguments
    saved = dict.fromkeys(slot for slot in saved_slots(mode) if slot is not None)
    training = program.mode == "train"
    fields = {
        "name": quoted(f"{_stem(bundle.name)}_{DIGEST}_{mode.name}"),
        "training": str(training),
        "owners": f"_fw_owners({training}, {owners})",
        "device_type": quoted(bundle.device_type),
        "parameters": constant(arguments.parameters),
        "structure": quoted(arguments.structure),
        "plain": str(arguments.plain),
        "autocast": dtype(bundle.autocast) if bundle.autocast else "None",
        "default_dtype": dtype(bundle.default_dtype),
        "watched": row(
            f"({constant(path)}, {quoted(name)}, _FwGone)" for path, name in bundle.absent
        ),
        "symbols": constant(
            tuple((each.input_index, each.dim, each.multiple) for each in program.symbols)
        ),
        "main": str(mode.main_input or 0),
        "n_tensors": str(len(program.bindings)),
        "n_outputs": str(wiring.n_outputs),
        "n_inference": str(wiring.n_inference),
        "n_results": str(len(wiring.results)),
        "fixed": constant(wiring.fixed),
        "mutations": _pairs(wiring.mutations),
        "saved": _numbers(tuple(saved)),
        "tangents": constant(wiring.tangents),
        "reach": constant(wiring.reach),
        **functions,
        **dict.fromkeys(_shortcuts(mode), "True"),
        **({"records": "True"} if mode.plans.has_layers else {}),
        **({"states": _states(program)} if program.held or program.effects else {}),
        **({"forward_only": quoted(program.forward_only)} if program.forward_only else {}),
        **without_checks(mode.plans),
    }
    return {name: text for name, text in fields.items() if _USUAL.get(name) != text}


# The values of `_FwMode` itself.
_USUAL = {
    "autocast": "None",
    "default_dtype": "torch.float32",
    "fixed": "()",
    "mutations": "()",
    "reach": "()",
    "symbols": "()",
    "watched": "()",
    "main": "0",
}


def records(modes: Sequence[Mapping[str, str]]) -> list[str]:
    """`_FW_MODES`: what all modes share, then a record for each."""
    first, *others = modes
    shared = {k: v for k, v in first.items() if all(each.get(k) == v for each in others)}
    common = ", ".join(f"{name}={text}" for name, text in shared.items())
    lines = [f"_FW_SHARED = dict({common})"]
    names: list[str] = []
    for mode in modes:
        own = [f"{name}={text}" for name, text in mode.items() if name not in shared]
        names.append(f"_FW_MODE_{len(names) + 1}")
        lines.append(f"{names[-1]} = _FwMode({', '.join([*own, '**_FW_SHARED'])})")
    return [*lines, f"_FW_MODES = tuple(map(_fw_register, {row(names)}))"]


def _numbers(values: Sequence[int]) -> str:
    """A tuple of numbers; a long one as text, with its runs as ranges."""
    if len(values) < LONG:
        return constant(tuple(values))
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"_fw_numbers({quoted(' '.join(words))})"


def _pairs(values: Sequence[tuple[int, int]]) -> str:
    if len(values) < LONG:
        return constant(tuple(values))
    first, second = (_numbers(each) for each in zip(*values, strict=True))
    return f"tuple(zip({first}, {second}))"


def _states(program: Program) -> str:
    """The attributes that the program depends on, and those that it changes."""
    paths = [each.path if each.kind == "constant" else "" for each in program.bindings]
    effects = tuple(
        (each.kind, each.owner, paths.index(each.name) if each.is_in_place else each.name)
        for each in program.effects
    )
    return f"_FwStates({constant(program.held)}, {constant(effects)})"


def _stem(name: str) -> str:
    """The part of an operator's name that recalls the model; operators' names begin with a
    letter."""
    word = python.identifier(name)
    return word if word[0].isalpha() else f"m{word}"


def _shortcuts(mode: Mode) -> list[str]:
    """Flags of the functions around the drivers that would return their arguments unchanged."""
    program, arguments = mode.plans.program, mode.bundle.arguments
    given = [(each.kind, each.path) for each in program.bindings]
    as_given = given == [("input", str(at)) for at in range(arguments.plain)]
    lone = program.output_tree == "o[0]" and mode.wiring.outputs == (FromResult(0),)
    return [name for name, holds in (("as_given", as_given), ("lone", lone)) if holds]


def owners_table(mode: Mode) -> str:
    """The submodules as they were, equal ones in one row: its paths come last.

    A submodule's `training` is listed only where it differs from the model's.
    """
    program = mode.plans.program
    bound = bound_paths(program)
    rows: dict[str, list[str]] = {}
    for owner in mode.plans.owners:
        rows.setdefault(_owner(owner, bound, program.mode == "train"), []).append(
            quoted(".".join(owner.path))
        )
    return row(f"({facts}, {row(paths)})" for facts, paths in rows.items())


def _owner(owner: Owner, bound: frozenset[str], training: bool) -> str:
    """The record of one submodule. The misfit test itself checks that `bound` tensors are set."""
    tensors = checked_tensors(owner, bound)
    told = [name != "training" or value is not training for name, value in owner.values]
    values = tuple(itertools.compress(owner.values, told))
    facts = (owner.kind, values, owner.children, tensors, owner.hooks)
    return ", ".join(map(constant, facts))
