"""`Graph` → `Plan`: fused kernels, visible calls and free views, in launch order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from fusewright.errors import GraphError
from fusewright.ir.graph import Graph, Node, TensorSpec
from fusewright.ir.loop import Load, LoopKernel, Store
from fusewright.plan.convolutions import gradient_step
from fusewright.plan.cost import call_bytes, call_operations
from fusewright.plan.epilogues import Epilogues, ended_step, ends, epilogues, stored
from fusewright.plan.finish import kernel_of, step_of
from fusewright.plan.fuse import fuse, needed_views
from fusewright.plan.logsumexps import better_in_two_sweeps, in_two_sweeps
from fusewright.plan.merge import Group
from fusewright.plan.names import loop_name, operators_of
from fusewright.plan.prologues import with_prologues
from fusewright.plan.reasons import reason
from fusewright.plan.staged_pairs import StagedPairs, pairs_of
from fusewright.plan.steps import Call, Fused, Plan, Step, View, inputs_of
from fusewright.plan.values import Values, is_view
from fusewright.plan.wide_reductions import split_wide_reductions
from fusewright.rewrite.layouts import GRADIENT
from fusewright.rewrite.views import is_opaque_view
from fusewright.target.target import Target


def plan(
    graph: Graph,
    sizes: Mapping[str, int],
    target: Target,
    *,
    repeated: frozenset[str] = frozenset(),
    shared: frozenset[str] = frozenset(),
) -> Plan:
    """Plan one canonical graph for `target`; `sizes` are the example's.

    `repeated` are values that backward computes again. They must have the same bits there, because
    backward looks for the elements that equal a stored maximum. The same holds for `shared`, the
    values that both graphs compute.
    """
    values = Values(graph, dict(sizes), target, repeated=repeated, shared=shared)
    values, taken = _fused(replace(values, graph=split_wide_reductions(values)))
    graph = values.graph
    views = needed_views(values)
    written, pairs = stored(values, taken), StagedPairs()
    before: Mapping[str, LoopKernel] = {}
    if target.conv_tf32:
        pairs = pairs_of(values, taken.units)
        before, taken, written = with_prologues(values, taken, pairs, written)
    ended = {}
    for name, node in values.with_epilogue.items():
        around = taken.of.get(name), written, before.get(name), pairs.by_convolution.get(name)
        ended[name] = ended_step(values, node, *around)
    steps: list[Step] = [_loop(values, group, written) for group in taken.loops]
    for node in graph.nodes:
        if node.name in ended:
            steps.append(ended[node.name])
        elif node.op == GRADIENT:
            pair = pairs.by_gradient.get(node.name)
            steps.append(
                gradient_step(values, node, pair, ended[pair.convolution] if pair else None)
            )
        elif is_view(node):
            if node.name in views:
                steps.append(View(_as_reshape(node)))
        elif is_opaque_view(node):
            steps.append(View(node))
        elif not values.is_item(node.name) and node.op != "getitem":
            steps.append(_call(values, node))
    ordered = _ordered(values, [_marked(step, repeated) for step in steps])
    return Plan(graph.inputs, ordered, graph.outputs, _specs(values, ordered))


def _fused(unfused: Values) -> tuple[Values, Epilogues]:
    """Groups and epilogues, with each logsumexp in the form that is best for its group."""
    while True:  # ends: each turn leaves fewer of them whole
        values, groups = fuse(replace(unfused, ends=ends(unfused)))
        taken = epilogues(values, groups)
        split = better_in_two_sweeps(values, taken.loops)
        if not split:
            return values, taken
        unfused = replace(unfused, graph=in_two_sweeps(unfused.graph, split))


def _as_reshape(node: Node) -> Node:
    """PyTorch's reshape is a view if possible, and a copy otherwise."""
    return replace(node, op="aten.reshape.default") if node.op == "aten.view.default" else node


def _marked(step: Step, repeated: frozenset[str]) -> Step:
    """The step; its kernel is marked if backward computes again what it stores."""
    if not isinstance(step, Fused) or repeated.isdisjoint(step.outputs):
        return step
    return replace(step, kernel=step.kernel.as_repeated())


def _loop(values: Values, group: Group, written: Collection[str]) -> Fused:
    kept = tuple(item for item in group.items if item in written)
    kernel = kernel_of(group.assembled, "kernel", "", kept, values)
    operators = operators_of(kernel)
    name = loop_name(operators)
    kernel = replace(kernel, name=name, summary=" → ".join(operators) or _moved(kernel))
    return step_of(kernel, kept, operators, values)


def _moved(kernel: LoopKernel) -> str:
    """What a kernel without operators does."""
    loads = [item.access for item in kernel.body if isinstance(item, Load)]
    stores = [item.access for item in kernel.body if isinstance(item, Store)]
    if not loads:
        return "fill"
    transposed = {each.strides for each in loads} != {each.strides for each in stores}
    return "copy to another layout" if transposed else "copy"


def _call(values: Values, node: Node) -> Call:
    if node.spec is not None:
        outputs: tuple[str, ...] = (node.name,)
    else:
        picked = {
            user.args[1]: user.name
            for user in values.users[node.name]
            if user.op == "getitem" and isinstance(user.args[1], int)
        }
        count = max((index for index in picked if isinstance(index, int)), default=-1) + 1
        outputs = tuple(picked.get(index, "") for index in range(count))
    specs = values.specs
    return Call(
        node=node,
        outputs=outputs,
        reason=reason(node, specs, values.target),
        bytes_moved=call_bytes(node, outputs, specs, values.sizes),
        operations=call_operations(node, specs, values.sizes),
    )


def _ordered(values: Values, steps: list[Step]) -> tuple[Step, ...]:
    """Launch order: a step comes after the steps whose results it reads, early ones first.

    Steps that draw random numbers keep the model's order, as in eager mode.
    """
    position = values.order
    maker = {name: step for step in steps for name in _results(step)}
    calls = {step.node.name: step for step in steps if isinstance(step, Call)}
    drawing = [calls[node.name] for node in values.random]
    before = {id(second): first for first, second in itertools.pairwise(drawing)}

    def awaited(step: Step) -> Iterator[Step]:
        if id(step) in before:
            yield before[id(step)]
        for name in inputs_of(step):
            if name in maker and maker[name] is not step:
                yield maker[name]

    def first_use(step: Step) -> int:
        return min((position[name] for name in _results(step) if name in position), default=0)

    return tuple(_after_awaited(sorted(steps, key=first_use), awaited))


def _after_awaited(
    steps: Iterable[Step], awaited: Callable[[Step], Iterator[Step]]
) -> Iterator[Step]:
    """The steps, each after those that it waits for. There is no recursion: chains of steps may
    have any length."""
    begun: set[int] = set()
    ended: set[int] = set()
    for start in steps:
        waiting = [(start, awaited(start))] if id(start) not in begun else []
        begun.add(id(start))
        while waiting:
            step, rest = waiting[-1]
            first = next(rest, None)
            if first is None:
                waiting.pop()
                ended.add(id(step))
                yield step
            elif id(first) not in begun:
                begun.add(id(first))
                waiting.append((first, awaited(first)))
            elif id(first) not in ended:
                raise GraphError(f"the plan has a cycle through {first.name}")


def _results(step: Step) -> tuple[str, ...]:
    if isinstance(step, Call) and not any(step.outputs):
        return (step.node.name,)
    return step.outputs


def _specs(values: Values, steps: tuple[Step, ...]) -> tuple[tuple[str, TensorSpec], ...]:
    names: dict[str, None] = {each.name: None for each in values.graph.inputs}
    for step in steps:
        names.update(dict.fromkeys(inputs_of(step)))
        names.update(dict.fromkeys(name for name in step.outputs if name))
    held = [(name, values.spec(name)) for name in names if values.has_spec(name)]
    for step in steps:
        held += step.staged if isinstance(step, Fused) else ()
    return tuple(held)


__all__ = ["Call", "Fused", "Plan", "View", "plan"]
