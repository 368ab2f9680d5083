"""The text of one module: kernel wrappers, the drivers of each mode, and their records.

The library executes exactly these lines, and an emitted file carries them, so there is one
behaviour to test. The operators' names hold a digest of the kernels and of these lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from fusewright.emit.bundle import ModuleBundle, Owner, ProgramPlans
from fusewright.emit.drivers import Mode, definitions, saved_slots, shortcuts
from fusewright.emit.python import (
    constant,
    dtype,
    function,
    identifier,
    indented,
    quoted,
    tensor_literal,
)
from fusewright.emit.steps import demands, literals_of
from fusewright.emit.wiring import wire
from fusewright.emit.wrappers import calls_of, wrapper_lines, wrappers_of
from fusewright.plan.in_place import in_place
from fusewright.plan.steps import Fused, Plan

_DIGEST = "_DIGEST_"


def module_text(bundle: ModuleBundle, taken: frozenset[str] = frozenset()) -> str:
    """Wrappers, drivers and `_FW_MODES`; they expect the run time's names and `_fw_kernels`.

    `taken` are names that no wrapper may have.
    """
    plans = [(plan, each) for each in bundle.modes for plan in plans_of(each)]
    found = [(plan, demands(plan, one_by_one=plan is each.backward)) for plan, each in plans]
    targets = _targets(bundle)
    wrappers = wrappers_of(bundle, found, taken, targets)
    lines = _literals(plan for plan, _ in plans)
    for wrapper in dict.fromkeys(wrappers.values()):
        lines += wrapper_lines(wrapper, bundle.language)
    calls = calls_of(wrappers, targets)
    modes = [Mode(bundle, each, wire(each), calls) for each in bundle.modes]
    written: dict[str, str] = {}
    records: list[str] = []
    for mode in modes:
        names: dict[str, str] = {}
        for each in definitions(mode):
            if each.text not in written:
                written[each.text] = f"_fw_{each.kind}_{mode.name}"
                lines += function(written[each.text], each.parameters, each.doc, each.body)
            names[each.kind] = written[each.text]
        records += _record(mode, names)
    lines += ["", "", "_FW_MODES = (", *indented(records), ")"]
    body = "\n".join(lines).strip("\n") + "\n"
    digest = hashlib.sha256((bundle.source.text + body).encode()).hexdigest()[:16]
    return body.replace(_DIGEST, digest)


def _targets(bundle: ModuleBundle) -> dict[Fused, dict[str, str]]:
    """For each loop, the outputs that it may write into the buffers they replace.

    Two graphs can hold the same loop; it may do only what is right in both.
    """
    found: dict[Fused, dict[str, str]] = {}
    for each in bundle.modes:
        for plan in plans_of(each):
            mutated = {
                value: plan.inputs[result.index].name
                for value, result in zip(plan.outputs, each.program.results, strict=False)
                if plan is not each.backward
                and result.kind == "mutation"
                and isinstance(value, str)
            }
            allowed = in_place(plan, mutated)
            for loop in plan.loops:
                mine = {value: allowed[value] for value in loop.outputs if value in allowed}
                before = found.get(loop, mine)
                found[loop] = {v: b for v, b in mine.items() if before.get(v) == b}
    return {loop: held for loop, held in found.items() if held}


def plans_of(plans: ProgramPlans) -> tuple[Plan, ...]:
    """The plans that get a driver: without a backward the forward plan is never run."""
    if plans.backward is None:
        return (plans.inference,)
    return (plans.inference, plans.forward, plans.backward)


def entries_text(bundle: ModuleBundle) -> str:
    """The C entry points with their bindings, as a dict."""
    items = [
        f"    {quoted(entry.name)}: {constant(entry.binding)}," for entry in bundle.source.entries
    ]
    return "\n".join(["{", *items, "}"])


def _literals(plans: Iterable[Plan]) -> list[str]:
    """Tensors that the model makes from numbers, each with a place for its copies on devices."""
    made = dict(tensor_literal(node) for plan in plans for node in literals_of(plan))
    return [line for name, text in made.items() for line in ("", "", f"{name} = {text}")]


def _record(mode: Mode, functions: Mapping[str, str]) -> list[str]:
    """The mode's `_FwMode`, registered."""
    bundle, program, wiring = mode.bundle, mode.plans.program, mode.wiring
    arguments = bundle.arguments
    saved = dict.fromkeys(slot for slot in saved_slots(mode) if slot is not None)
    fields = {
        "name": quoted(f"{_operator_stem(bundle.name)}_{_DIGEST}_{mode.name}"),
        "training": str(program.mode == "train"),
        "autocast": dtype(bundle.autocast) if bundle.autocast else "None",
        "device_type": quoted(bundle.device_type),
        "parameters": constant(arguments.parameters),
        "structure": quoted(arguments.structure),
        "plain": str(arguments.plain),
        "owners": "_OWNERS_",
        "symbols": constant(tuple((each.input_index, each.dim) for each in program.symbols)),
        "main": str(mode.main_input or 0),
        "n_tensors": str(len(program.bindings)),
        "n_outputs": str(wiring.n_outputs),
        "n_inference": str(wiring.n_inference),
        "n_results": str(len(wiring.results)),
        "fixed": constant(wiring.fixed),
        "mutations": constant(wiring.mutations),
        "saved": constant(tuple(saved)),
        "tangents": constant(wiring.tangents),
        "reach": constant(wiring.reach),
        **functions,
        "default_dtype": dtype(bundle.default_dtype),
        **dict.fromkeys(shortcuts(mode), "True"),
        **({"records": "True"} if mode.plans.has_layers else {}),
    }
    inside = [f"{name}={text}," for name, text in fields.items()]
    bound = frozenset(each.path for each in program.bindings if each.kind != "input")
    place = inside.index("owners=_OWNERS_,")
    inside[place : place + 1] = [
        "owners=(",
        *(f"    {_owner(o, bound)}," for o in mode.plans.owners),
        "),",
    ]
    return ["_fw_register(", "    _FwMode(", *indented(inside, 2), "    )", "),"]


def _operator_stem(name: str) -> str:
    return identifier(f"m_{name}").removeprefix("m_") or "model"


def _owner(owner: Owner, bound: frozenset[str]) -> str:
    """The record of one submodule; of `bound` tensors the misfit test sees that they are there."""
    tensors = [
        (table, name, here)
        for table, name, here in owner.tensors
        if not (here is True and ".".join((*owner.path, name)) in bound)
    ]
    fields = (owner.path, owner.kind, owner.values, owner.children, tuple(tensors), owner.hooks)
    return constant(fields)
