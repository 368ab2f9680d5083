"""The text of one module: kernel wrappers, the drivers of each mode, and their records.

The package executes exactly these lines, and an emitted file contains them, so both behave the
same. The names of operators contain a digest of the kernels and of these lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from fusewright.emit import python
from fusewright.emit.bundle import ModuleBundle, Owner
from fusewright.emit.drivers import Mode, definitions, saved_slots, shortcuts
from fusewright.emit.python import constant, quoted
from fusewright.emit.steps import demands, literals_of
from fusewright.emit.wiring import wire
from fusewright.emit.wrappers import calls_of, wrapper_lines, wrappers_of
from fusewright.plan.in_place import in_place
from fusewright.plan.steps import Fused, Plan

_DIGEST = "_DIGEST_"


def module_text(bundle: ModuleBundle, taken: frozenset[str] = frozenset()) -> str:
    """Wrappers, drivers and `_FW_MODES`. They use the run time's names and `_fw_kernels`.

    No wrapper gets one of the names that are `taken`.
    """
    plans = [(plan, plan is each.backward) for each in bundle.modes for plan in each.driven]
    found = [(plan, demands(plan, one_by_one=backward)) for plan, backward in plans]
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
                lines += python.function(written[each.text], each.parameters, each.doc, each.body)
            names[each.kind] = written[each.text]
        records += _record(mode, names)
    lines += ["", "", "_FW_MODES = (", *python.indented(records), ")"]
    body = "\n".join(lines).strip("\n") + "\n"
    digest = hashlib.sha256((bundle.source.text + body).encode()).hexdigest()[:16]
    return body.replace(_DIGEST, digest)


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
    """The C entry points with their bindings, as a dict."""
    pairs = [(quoted(each.name), constant(each.binding)) for each in bundle.source.entries]
    return "\n".join(["{", *(f"    {name}: {binding}," for name, binding in pairs), "}"])


def _literals(plans: Iterable[Plan]) -> list[str]:
    """Tensors that the model makes from constants, each with a dict for its copies on devices."""
    made = dict(python.tensor_literal(node) for plan in plans for node in literals_of(plan))
    return [line for name, text in made.items() for line in ("", "", f"{name} = {text}")]


def _record(mode: Mode, functions: Mapping[str, str]) -> list[str]:
    """The mode's `_FwMode`, registered."""
    bundle, program, wiring = mode.bundle, mode.plans.program, mode.wiring
    arguments = bundle.arguments
    saved = dict.fromkeys(slot for slot in saved_slots(mode) if slot is not None)
    stem = python.identifier(f"m_{bundle.name}").removeprefix("m_") or "model"
    fields = {
        "name": quoted(f"{stem}_{_DIGEST}_{mode.name}"),
        "training": str(program.mode == "train"),
        "autocast": python.dtype(bundle.autocast) if bundle.autocast else "None",
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
        "default_dtype": python.dtype(bundle.default_dtype),
        **dict.fromkeys(shortcuts(mode), "True"),
        **({"records": "True"} if mode.plans.has_layers else {}),
    }
    inside = [f"{name}={text}," for name, text in fields.items()]
    bound = frozenset(each.path for each in program.bindings if each.kind != "input")
    at = inside.index("owners=_OWNERS_,")
    owners = (f"    {_owner(each, bound)}," for each in mode.plans.owners)
    inside[at : at + 1] = ["owners=(", *owners, "),"]
    return ["_fw_register(", "    _FwMode(", *python.indented(inside, 2), "    )", "),"]


def _owner(owner: Owner, bound: frozenset[str]) -> str:
    """The record of one submodule. The misfit test itself checks that `bound` tensors are set."""
    tensors = tuple(
        (table, name, is_set)
        for table, name, is_set in owner.tensors
        if not (is_set is True and ".".join((*owner.path, name)) in bound)
    )
    return constant((owner.path, owner.kind, owner.values, owner.children, tensors, owner.hooks))
