"""A plan's steps as straight-line Python: one call a step, each value deleted after its last use.

For a backward plan every step is under the condition that some gradient which depends on it is
wanted; what no gradient needs is neither computed nor allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusewright.emit.python import (
    Scope,
    call,
    device_text,
    dims,
    indented,
    operator,
    quoted,
    row,
    tensor_literal,
)
from fusewright.errors import GraphError
from fusewright.ir.graph import Node
from fusewright.plan.steps import (
    Call,
    Fused,
    Loop,
    Plan,
    Product,
    Step,
    View,
    Window,
    WindowGradient,
    inputs_of,
)

Demand = frozenset[int]
LITERAL = "literal"
# The parameter of a driver that lets kernels write new buffer values into the buffers themselves.
IN_PLACE = "fw_in_place"


@dataclass(frozen=True)
class Demands:
    """For each value the outputs that depend on it; `everything` is all of the outputs."""

    of: Mapping[str, Demand]
    everything: Demand

    def step(self, step: Step) -> Demand:
        if not isinstance(step, Fused) and step.node.effect:
            return self.everything
        return frozenset().union(*(self.of.get(name, frozenset()) for name in step.outputs))


def demands(plan: Plan, one_by_one: bool) -> Demands:
    """Which outputs need which value; all outputs count as one unless `one_by_one`."""
    of: dict[str, Demand] = {}
    for position, output in enumerate(plan.outputs):
        if isinstance(output, str):
            mark = frozenset({position if one_by_one else 0})
            of[output] = of.get(output, frozenset()) | mark
    everything = frozenset().union(*of.values()) or frozenset({0})
    for step in reversed(plan.steps):
        wanted = Demands(of, everything).step(step)
        if isinstance(step, Window) and step.kernel.lines:
            of[step.kernel.lines] = wanted  # the convolution itself goes by them
        for name in inputs_of(step):
            of[name] = of.get(name, frozenset()) | wanted
    return Demands(of, everything)


def wants(step: Fused, found: Demands) -> tuple[Demand, ...] | None:
    """The demand for each output, or None where all are wanted whenever the kernel runs."""
    whole = found.step(step)
    each = tuple(found.of.get(name, frozenset()) for name in step.outputs)
    return None if all(demand == whole for demand in each) else each


def condition(demand: Demand, everything: Demand) -> str:
    if not demand:
        return "False"
    if demand == everything:
        return "True"
    return " or ".join(f"need[{position}]" for position in sorted(demand))


@dataclass(frozen=True)
class WrapperCall:
    """How a kernel is called: the wrapper's name and the symbols it takes after the tensors.

    `targets` pairs a keyword of the wrapper with the value whose memory that output may take.
    """

    name: str
    symbols: tuple[str, ...]
    targets: tuple[tuple[str, str], ...] = ()


def step_lines(
    plan: Plan,
    found: Demands,
    scope: Scope,
    wrappers: Mapping[Fused, WrapperCall],
    laid_out: frozenset[str],
    kept: frozenset[str],
) -> list[str]:
    """All steps as lines. `laid_out` must have their spec's strides, `kept` are not deleted."""
    live = [step for step in plan.steps if found.step(step)]
    last = {name: index for index, step in enumerate(live) for name in _mentions(step)}
    lines: list[str] = []
    open_condition = "True"
    for index, step in enumerate(live):
        wanted = condition(found.step(step), found.everything)
        if wanted != open_condition and wanted != "True":
            lines.append(f"if {wanted}:")
        open_condition = wanted
        own = _one_step(plan, step, found, scope, wrappers, laid_out)
        ended = [
            scope[name] for name in _mentions(step) if last[name] == index and name not in kept
        ]
        own += [f"del {', '.join(ended)}"] if ended else []
        lines += own if wanted == "True" else indented(own)
    return lines


def _mentions(step: Step) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in (*inputs_of(step), *step.outputs) if name))


def _one_step(
    plan: Plan,
    step: Step,
    found: Demands,
    scope: Scope,
    wrappers: Mapping[Fused, WrapperCall],
    laid_out: frozenset[str],
) -> list[str]:
    match step:
        case Loop() | Product() | Window() | WindowGradient():
            return _kernel_lines(step, found, scope, wrappers[step])
        case View():
            return view_lines(step, scope)
        case Call():
            specs = dict(plan.specs)
            lines = _call_lines(step, scope, found)
            for name in step.outputs:
                if name in laid_out:
                    strides = dims(specs[name].strides)
                    line = f"{scope[name]} = _fw_laid_out({scope[name]}, {strides})"
                    masked = step.node.is_masked
                    lines += [f"if {scope[name]} is not None:", *indented([line])] * masked
                    lines += [line] * (not masked)
            return lines


def _kernel_lines(step: Fused, found: Demands, scope: Scope, wrapper: WrapperCall) -> list[str]:
    args = [scope[name] for name in step.inputs] or ["device"]
    args += wrapper.symbols
    each = wants(step, found)
    if each is not None:
        whole = found.step(step)
        flags = ["True" if one == whole else condition(one, found.everything) for one in each]
        args.append(f"want={row(flags)}")
    for keyword, value in wrapper.targets:
        args.append(f"{keyword}={scope[value]} if {IN_PLACE} else None")
    return call(", ".join(scope[name] for name in step.outputs), wrapper.name, args)


def view_lines(step: View, scope: Scope) -> list[str]:
    """A view; picking one of several results is an index."""
    if step.node.op == "getitem":
        source, position = step.node.refs()[0], step.node.args[1]
        return [f"{scope[step.name]} = {scope[source]}[{int(str(position))}]"]
    return call(scope[step.name], *operator(step.node, scope))


def _call_lines(step: Call, scope: Scope, found: Demands) -> list[str]:
    if step.node.op == LITERAL and step.node.spec is not None:
        name, _ = tensor_literal(step.node)
        device = device_text(step.node.spec.device, scope)
        return [f"{scope[step.outputs[0]]} = _fw_here(*{name}, {device})"]
    callee, args = operator(step.node, scope)
    if step.node.layer:
        callee, args = _layer(step, args, found)
    elif step.node.is_masked:
        args = [*args[:-1], _mask(step, found, 3)]
    if not any(step.outputs):
        return call("", callee, args)
    if step.node.spec is not None:
        if len(step.outputs) != 1:
            raise GraphError(f"{step.name} has one result but {len(step.outputs)} names")
        return call(scope[step.outputs[0]], callee, args)
    targets = [scope[name] if name else "_" for name in step.outputs]
    # The star takes results that nobody named; `_` must not keep them alive.
    return [*call(", ".join([*targets, "*_"]), callee, args), "del _"]


def _layer(step: Call, args: list[str], found: Demands) -> tuple[str, list[str]]:
    """The run time's function for a recurrent layer, or for its gradients."""
    kind = quoted(step.node.layer)
    if step.node.is_masked:
        changes, tape, *rest = args
        return "_fw_recurrent_backward", [_mask(step, found), changes, tape, kind, *rest]
    results = 3 if step.node.layer == "lstm" else 2
    record = any(step.outputs[results:])  # somebody reads the tape
    return "_fw_recurrent", [str(record), kind, *args]


def _mask(step: Call, found: Demands, count: int = 0) -> str:
    """Which of the gradients are wanted: the others are not computed."""
    whole = found.step(step)
    wanted = [found.of.get(name, frozenset()) if name else frozenset() for name in step.outputs]
    wanted += [frozenset()] * (count - len(wanted))
    flags = ["True" if one == whole else condition(one, found.everything) for one in wanted]
    return f"[{', '.join(flags)}]"


def read_by_loops(plan: Plan, seeds: Iterable[str] = ()) -> frozenset[str]:
    """Values that a kernel reads, itself or through views, and those that `seeds` rest on."""
    read = set(seeds)
    for step in reversed(plan.steps):
        if isinstance(step, Fused):
            read.update(step.inputs)
        elif isinstance(step, View) and step.name in read:
            read.update(inputs_of(step))
    return frozenset(read)


def literals_of(plan: Plan) -> list[Node]:
    """The constants that the plan's graph holds."""
    calls = [step for step in plan.steps if isinstance(step, Call)]
    return [step.node for step in calls if step.node.op == LITERAL]


def names_of(plan: Plan) -> Sequence[str]:
    """Every value of the plan, inputs first."""
    made = [name for step in plan.steps for name in step.outputs if name]
    return [each.name for each in plan.inputs] + made
