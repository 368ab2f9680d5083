"""The text of one graph of a back-end: a function from a list of arguments to a tuple.

The list is emptied, so that a tensor is freed after its last use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusewright.emit import steps
from fusewright.emit.bundle import ModuleBundle, ProgramPlans
from fusewright.emit.python import (
    Scope,
    call,
    device_kind,
    dims,
    function,
    identifiers,
    mentions,
    returned,
)
from fusewright.emit.text import literal_lines
from fusewright.emit.wrap import wrapped
from fusewright.emit.wrappers import calls_of, wrapper_lines, wrappers_of
from fusewright.plan.steps import Fused, Plan

GRAPH = "_fw_graph"


@dataclass(frozen=True)
class FlatCall:
    """How a graph is called. `list_name` is the list of arguments: for each the input or symbol
    that it is, or an empty name. `sizes` are symbols with the text that computes them. If
    `any_layout`, tensors may come with other strides than the graph's."""

    list_name: str
    arguments: tuple[str, ...]
    sizes: tuple[tuple[str, str], ...]
    any_layout: bool


def flat_text(bundle: ModuleBundle, how: FlatCall) -> str:
    """The functions of the kernels, and `GRAPH`, which runs the first plan whose guards hold."""
    plans = [each.inference for each in bundle.modes]
    found = [(plan, steps.demands(plan, one_by_one=False)) for plan in plans]
    wrappers = wrappers_of(bundle, found, frozenset(), {})
    lines = literal_lines(plans)
    for wrapper in dict.fromkeys(wrappers.values()):
        lines += wrapper_lines(wrapper, bundle.language)
    calls = calls_of(wrappers, {})
    for at, (each, (_, demands)) in enumerate(zip(bundle.modes, found, strict=True)):
        name = GRAPH if len(bundle.modes) == 1 else f"{GRAPH}_{at}"
        body = _body(each, demands, how, calls, bundle.device_type)
        lines += function(name, [how.list_name], "One graph, step by step.", body)
    if len(bundle.modes) > 1:
        lines += _choice(bundle.modes, how)
    return "\n".join(wrapped(lines)).strip("\n") + "\n"


def _body(
    plans: ProgramPlans,
    demands: steps.Demands,
    how: FlatCall,
    calls: Mapping[Fused, steps.WrapperCall],
    device_type: str,
) -> list[str]:
    plan = plans.inference
    symbols = [each.name for each in plans.program.symbols]
    scope = Scope(identifiers(steps.names_of(plan), symbols), device_type)
    results = frozenset(each for each in plan.outputs if isinstance(each, str))
    read = steps.read_by_loops(plan, results)
    body = steps.step_lines(plan, demands, scope, calls, read, results)
    body += returned([scope[e] if isinstance(e, str) else str(e) for e in plan.outputs])
    given = [scope.names.get(name, name) or "_" for name in how.arguments]
    lines = [f"[{', '.join(given)}] = {how.list_name}"] if given else []
    lines += _size_lines(how, body)
    lines.append(f"{how.list_name}.clear()")
    for each in plan.inputs if how.any_layout else ():
        if each.name in read:
            lines += call(
                scope[each.name], "_fw_laid_out", [scope[each.name], dims(each.spec.strides)]
            )
    return [*lines, *_device_line(plan, scope, body), *body]


def _size_lines(how: FlatCall, body: Sequence[str]) -> list[str]:
    """Lines that compute the symbols that the body or another symbol uses."""
    lines: list[str] = []
    for name, text in reversed(how.sizes):
        if text and mentions([*body, *lines], name):
            lines.insert(0, f"{name} = {text}")
    return lines


def _device_line(plan: Plan, scope: Scope, body: Sequence[str]) -> list[str]:
    if not mentions(body, "device"):
        return []
    inputs = (each for each in plan.inputs if device_kind(each.spec) == scope.device_type)
    main = next(inputs, None)
    text = f'torch.device("{scope.device_type}")' if main is None else f"{scope[main.name]}.device"
    return [f"device = {text}"]


def _choice(modes: Sequence[ProgramPlans], how: FlatCall) -> list[str]:
    body: list[str] = []
    for at, each in enumerate(modes):
        test = " and ".join(each.guards)
        run = f"return {GRAPH}_{at}({how.list_name})"
        body += [f"if {test}:", f"    {run}"] if test else [run]
    given = [name if name in dict(how.sizes) else "_" for name in how.arguments]
    used = [f"[{', '.join(given)}] = {how.list_name}"] if given else []
    doc = "One graph, by the plan that is made for its sizes."
    return function(GRAPH, [how.list_name], doc, [*used, *_size_lines(how, body), *body])
