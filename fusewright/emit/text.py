"""The text of one module: what a reader wants (wrappers, drivers) and the tables around it.

The package executes exactly these lines, and an emitted file contains them, so both behave the
same. The names of operators contain a digest of the kernels and of these lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusewright.emit import python
from fusewright.emit.bundle import ModuleBundle
from fusewright.emit.drivers import FORWARD, SAVED, Definition, Mode, demands, drivers
from fusewright.emit.facts import known
from fusewright.emit.python import quoted
from fusewright.emit.steps import literals_of
from fusewright.emit.tables import DIGEST, INPUTS, owners_table, record, records, tables
from fusewright.emit.wiring import wire
from fusewright.emit.wrap import wrapped
from fusewright.emit.wrappers import calls_of, wrapper_lines, wrappers_of
from fusewright.plan.in_place import in_place
from fusewright.plan.steps import Fused, Plan

# Functions that others name come first.
_ORDER = ("saved", "inputs", "gather", "misfit", "outputs", "layouts", "gradient_layouts")
_DRIVERS = ("forward", "inference", "backward")


@dataclass(frozen=True)
class ModuleText:
    """`drivers`: the model's forward and backward, step by step.

    `tables`: a function for each kernel, inputs, guards, layouts, and `_FW_MODES`. Both use the run
    time's names and `_fw_kernels`. `facts` are what all modes have in common.
    """

    drivers: str
    tables: str
    facts: Mapping[str, object]


def module_text(bundle: ModuleBundle, taken: frozenset[str] = frozenset()) -> ModuleText:
    """The text of a module. No function gets one of the names that are `taken`."""
    wired = [(each, wire(each)) for each in bundle.modes]
    found = [pair for each in wired for pair in demands(*each).values()]
    targets = _targets(bundle)
    wrappers = wrappers_of(bundle, found, taken, targets)
    calls = calls_of(wrappers, targets)
    modes = [Mode(bundle, plans, wiring, calls) for plans, wiring in wired]
    named = _named(modes, taken)
    own = _functions(named, _DRIVERS, plain=False)
    rest = literal_lines(plan for plan, _ in found)
    for wrapper in dict.fromkeys(wrappers.values()):
        rest += wrapper_lines(wrapper, bundle.language)
    rest += [*_functions(named, _ORDER), *_functions(named, _DRIVERS, plain=True)]
    made = _records(modes, named)
    rest += _modes(modes, made)
    texts = ["\n".join(wrapped(lines)).strip("\n") + "\n" for lines in (own, rest)]
    digest = hashlib.sha256("".join([bundle.source.text, *texts]).encode()).hexdigest()[:16]
    own_text, tables_text = (text.replace(DIGEST, digest) for text in texts)
    return ModuleText(own_text, tables_text, known(made))


@dataclass(frozen=True)
class _Named:
    """A function of one mode. Equal functions of several modes have one name."""

    name: str
    definition: Definition


def _named(modes: list[Mode], taken: frozenset[str]) -> list[dict[str, _Named]]:
    """The functions of each mode by their kind. What all modes share is not named after one."""
    made = [{each.kind: each for each in (*tables(mode), *drivers(mode))} for mode in modes]
    found: list[dict[str, _Named]] = [{} for _ in modes]
    for kind in (*_ORDER, *_DRIVERS):
        sharing: dict[str, list[int]] = {}
        mine = {at: _linked(each[kind], found[at]) for at, each in enumerate(made) if kind in each}
        for at, definition in mine.items():
            sharing.setdefault(definition.text, []).append(at)
        for places in sharing.values():
            suffix = f"_{modes[places[0]].name}" if len(sharing) > 1 else ""
            name = f"_{kind}{suffix}" if kind in _DRIVERS else f"_model_{kind}{suffix}"
            while name in taken:
                name += "_v"
            for at in places:
                found[at][kind] = _Named(name, mine[at])
    return found


def _linked(definition: Definition, named: dict[str, _Named]) -> Definition:
    """The function with the names of the tables that it reads."""
    body = definition.body
    for stands, kind in ((SAVED, "saved"), (INPUTS, "inputs"), (FORWARD, "forward")):
        if kind in named:
            body = [line.replace(stands, named[kind].name) for line in body]
    return replace(definition, body=body)


def _functions(
    named: list[dict[str, _Named]], kinds: Iterable[str], *, plain: bool = False
) -> list[str]:
    """The definitions, each once."""
    lines: list[str] = []
    written: set[str] = set()
    for kind in kinds:
        for each in (functions[kind] for functions in named if kind in functions):
            if each.name not in written and each.definition.plain == plain:
                written.add(each.name)
                made = each.definition
                lines += python.function(each.name, made.parameters, made.doc, made.body)
    return lines


def _records(modes: Sequence[Mode], named: Sequence[Mapping[str, _Named]]) -> list[dict[str, str]]:
    """The fields of each mode's record."""
    names = _owners_names(modes)
    made = []
    for mode, functions in zip(modes, named, strict=True):
        fields = {kind: each.name for kind, each in functions.items() if kind not in _INNER}
        made.append(record(mode, fields, names[owners_table(mode)]))
    return made


def _owners_names(modes: Sequence[Mode]) -> dict[str, str]:
    """The tables of submodules, each with its name."""
    tables = dict.fromkeys(map(owners_table, modes))
    numbers = (f"_FW_OWNERS_{at + 1}" for at in range(len(tables)))
    return dict(zip(tables, numbers if len(tables) > 1 else ["_FW_OWNERS"], strict=True))


def _modes(modes: Sequence[Mode], made: Sequence[Mapping[str, str]]) -> list[str]:
    """The tables of submodules, and a record for each mode."""
    tables = _owners_names(modes).items()
    return ["", "", *(f"{name} = {table}" for table, name in tables), *records(made)]


# Tables that only other functions read.
_INNER = ("saved", "inputs")


def _targets(bundle: ModuleBundle) -> dict[Fused, dict[str, str]]:
    """For each kernel, the outputs that it may write into the buffers that they replace.

    Two graphs can contain the same kernel. It may write in place only what is right in both.
    """
    found: dict[Fused, dict[str, str]] = {}
    for mode, plan in [(each, plan) for each in bundle.modes for plan in each.driven]:
        results = () if plan is mode.backward else mode.program.results
        mutated = {
            value: plan.inputs[result.index].name
            for value, result in zip(plan.outputs, results, strict=False)
            if result.kind == "mutation" and isinstance(value, str)
        }
        allowed = in_place(plan, mutated)
        for step in plan.kernels:
            mine = {value: allowed[value] for value in step.outputs if value in allowed}
            before = found.get(step, mine)
            found[step] = {v: b for v, b in mine.items() if before.get(v) == b}
    return {step: held for step, held in found.items() if held}


def entries_text(bundle: ModuleBundle) -> str:
    """The C entry points, each with the macro that decides its precision, as a dict."""
    pairs = [(quoted(each.name), quoted(each.macro)) for each in bundle.source.entries]
    return "{" + ", ".join(f"{name}: {macro}" for name, macro in pairs) + "}"


def literal_lines(plans: Iterable[Plan]) -> list[str]:
    """Tensors that the model makes from constants, each with a dict for its copies on devices."""
    made = dict(python.tensor_literal(node) for plan in plans for node in literals_of(plan))
    return [f"{name} = {text}" for name, text in made.items()]
