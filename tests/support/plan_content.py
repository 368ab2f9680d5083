"""What plans compute, without the names of their values and the order of independent steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fusewright.ir.graph import Graph, Program, Ref
from fusewright.ir.loop import Apply, Instruction, Load, LoopKernel, Reduce, Scan, Store
from fusewright.plan import plan
from fusewright.plan.steps import Fused, Plan, Step
from fusewright.rewrite import rewrite
from fusewright.rewrite.convolutions import with_convolutions
from fusewright.rewrite.layouts import with_channels_last
from fusewright.rewrite.matmuls import with_matmuls
from fusewright.target.target import Target

Plans = dict[str, Plan]
PARTS = ("inference", "forward", "backward")


def planned(program: Program, target: Target) -> tuple[Program, Plans]:
    """The rewritten program and the plans of its graphs, our matmuls and convolutions included."""
    program = rewrite(program)
    sizes = program.example_sizes

    def ours(graph: Graph | None, trains: bool = False) -> Graph | None:
        if graph is None or not target.tensor_cores:
            return graph
        return with_convolutions(with_matmuls(graph, sizes, target), sizes, target, trains)

    trains = program.backward is not None
    program = replace(
        program,
        inference=ours(program.inference),
        forward=ours(program.forward, trains),
        backward=ours(program.backward),
    )
    program = with_channels_last(program) if target.transposing else program
    graphs = [(part, getattr(program, part)) for part in PARTS]
    return program, {part: plan(each, sizes, target) for part, each in graphs if each is not None}


_WITHOUT_BIAS = {
    "aten.addmm.default": "aten.mm.default",
    "aten.baddbmm.default": "aten.bmm.default",
}


def structure(plan: Plan) -> Counter[str]:
    """How many kernels of each kind a plan has, and which calls; a matmul may add a bias."""
    steps = [step for step in plan.steps if step.kind != "view"]
    names = [step.kind if isinstance(step, Fused) else step.node.op for step in steps]
    return Counter(_WITHOUT_BIAS.get(name, name) for name in names)


def contents(program: Program, plans: Plans) -> dict[str, object]:
    """For each graph, a text of what its outputs are computed by. Values that forward saves are
    compared as a set, and backward reads them by what they are."""
    sources = {
        each.name: (binding.kind, binding.path)
        for each, binding in zip(program.forward.inputs, program.bindings, strict=True)
    }
    first = sum(result.kind != "saved" for result in program.results)
    made = _outputs(plans["forward"], sources)
    found: dict[str, object] = {
        "inference": _outputs(plans["inference"], sources),
        "forward": (made[:first], frozenset(made[first:])),
    }
    if "backward" in plans:
        given = plans["backward"].inputs
        saved = [*made[first:], *(("tangent", at) for at in range(len(given)))]
        named = {each.name: value for each, value in zip(given, saved, strict=False)}
        found["backward"] = _outputs(plans["backward"], named)
    return found


def _outputs(plan: Plan, sources: Mapping[str, object]) -> tuple[object, ...]:
    known = dict(sources)
    for step in plan.steps:
        if isinstance(step, Fused) and isinstance(step.kernel, LoopKernel):
            known.update(_stored(step, step.kernel, known))
        else:
            text = hash(_text(step, known))
            known.update({name: (text, at) for at, name in enumerate(step.outputs) if name})
    return tuple(known[each] if isinstance(each, str) else each for each in plan.outputs)


def _text(step: Step, known: Mapping[str, object]) -> str:
    """A step, with what it reads instead of the names."""
    if isinstance(step, Fused):
        return repr((step.kernel.canonical(), [known[name] for name in step.inputs]))

    def arg(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(arg(item) for item in value)
        return known[value.name] if isinstance(value, Ref) else value

    return repr((step.node.op, arg(step.node.args), arg(step.node.kwargs)))


def _stored(step: Fused, kernel: LoopKernel, known: Mapping[str, object]) -> dict[str, object]:
    """What a loop stores in each output: the operators behind it, whatever their order is."""
    given = dict(zip((each.name for each in kernel.arguments), step.inputs, strict=False))
    outputs = [each.name for each in kernel.arguments if each.is_output]
    values: dict[str, int] = {}
    stores: dict[str, int] = {}
    for item in kernel.body:
        if isinstance(item, Store):
            stores[item.access.buffer] = hash(repr((values[item.value], _bare(item))))
            continue
        read = [known[given[item.access.buffer]]] if isinstance(item, Load) else []
        read += [values[name] for name in getattr(item, "operands", ())]
        read += [values[item.operand]] if isinstance(item, Reduce | Scan) else []
        values[item.name] = hash(repr((_bare(item), read)))
        if isinstance(item, Reduce) and item.second:
            values[item.second] = hash(("second", values[item.name]))
    sizes = [[axis.size for axis in axes] for axes in (kernel.outer, kernel.inner)]
    whole = hash(repr((sizes, kernel.repeated, sorted(stores.values()))))
    return {
        name: (whole, stores[buffer])
        for name, buffer in zip(step.outputs, outputs, strict=True)
        if name
    }


def _bare(item: Instruction) -> Instruction:
    """An instruction without the names of values and buffers."""
    if isinstance(item, Load | Store):
        item = replace(item, access=replace(item.access, buffer=""))
    if isinstance(item, Store):
        return replace(item, value="")
    nameless = replace(item, name="")
    match nameless:
        case Apply():
            return replace(nameless, operands=())
        case Reduce():
            return replace(nameless, operand="", second="")
        case Scan():
            return replace(nameless, operand="")
    return nameless
