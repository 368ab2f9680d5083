"""A plan's steps as straight-line Python: one call a step, each value deleted after its last use.

A step of a backward plan runs only if a gradient that depends on it is wanted. Other values are
neither computed nor allocated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusewright.emit import python
from fusewright.emit.python import Scope, call, indented
from fusewright.errors import GraphError
from fusewright.ir.graph import ITEM_BYTES, Node, TensorSpec
from fusewright.plan.steps import Call, Fused, Plan, Step, View, inputs_of
from fusewright.rewrite.tf32_operands import ALLOWED

Demand = frozenset[int]
LITERAL = "literal"
SMALL_BYTES = 65536
# The parameter of a driver, and of a kernel's function, that lets kernels write new values into the
# buffers themselves.
IN_PLACE = "in_place"
# The parameter of forward that asks for the values that backward reads.
SAVES = "saves"


@dataclass(frozen=True)
class Demands:
    """For each value the outputs that depend on it. `everything` is the set of all outputs.

    `names` are variables for sets of several outputs, `lines` their definitions. Where two plans
    are joined, `apart` says for each step, by its id, which of them run it.
    """

    of: Mapping[str, Demand]
    everything: Demand
    apart: Mapping[int, Demand] = field(default_factory=dict)
    names: Mapping[Demand, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()

    def step(self, step: Step) -> Demand:
        if id(step) in self.apart:
            return self.apart[id(step)]
        if not isinstance(step, Fused) and step.node.effect:
            return self.everything
        return frozenset().union(*(self.of.get(name, frozenset()) for name in step.outputs))

    def condition(self, demand: Demand) -> str:
        """Whether one of these outputs is wanted, as an expression."""
        if not demand:
            return "False"
        if demand == self.everything:
            return "True"
        return self.names.get(demand) or " or ".join(f"need[{at}]" for at in sorted(demand))

    def definitions(self, body: Iterable[str]) -> list[str]:
        """The lines that define the variables that `body` uses."""
        used = {word for line in body for word in _NEED.findall(line)}
        kept: list[str] = []
        for line in reversed(self.lines):
            words = _NEED.findall(line)
            if words[0] in used:
                used.update(words)
                kept.append(line)
        return kept[::-1]


_NEED = re.compile(r"\bneed_\d+\b")
# A set of outputs may be written by the sets so many places before it.
_EARLIER = 8


def demands(plan: Plan, one_by_one: bool) -> Demands:
    """Which outputs need which value. Unless `one_by_one`, all outputs count as one."""
    of: dict[str, Demand] = {}
    for position, output in enumerate(plan.outputs):
        if isinstance(output, str):
            mark = frozenset({position if one_by_one else 0})
            of[output] = of.get(output, frozenset()) | mark
    everything = frozenset().union(*of.values()) or frozenset({0})
    found = Demands(of, everything)
    sets = _spread(found, of, plan)
    named = sorted((each for each in sets if len(each) > 2 and each != everything), key=_by_size)
    names = {each: f"need_{at + 1}" for at, each in enumerate(named)}
    before = [named[max(0, at - _EARLIER) : at] for at in range(len(named))]
    unions = [_union(each, near, names) for each, near in zip(named, before, strict=True)]
    lines = tuple(f"{names[each]} = {text}" for each, text in zip(named, unions, strict=True))
    return replace(found, names=names, lines=lines)


def _spread(found: Demands, of: dict[str, Demand], plan: Plan) -> set[Demand]:
    """Enter what each value of the plan is needed for into `of`, the table of `found`. Returns the
    sets of outputs that occur."""
    sets = set()
    for step in reversed(plan.steps):
        wanted = found.step(step)
        sets.add(wanted)
        for name, _ in step.staged if isinstance(step, Fused) else ():
            of[name] = wanted  # The kernel itself needs it.
        for name in inputs_of(step):
            of[name] = of.get(name, frozenset()) | wanted
    return sets | set(of.values())


def _by_size(demand: Demand) -> tuple[int, list[int]]:
    return len(demand), sorted(demand)


def _union(demand: Demand, smaller: Sequence[Demand], names: Mapping[Demand, str]) -> str:
    """A set of outputs by smaller sets, slices and single outputs.

    The deeper a layer is, the more gradients need it, so most sets contain the one before.
    """
    rest, terms = demand, []
    for each in reversed(smaller):
        if each <= rest:
            terms.append(names[each])
            rest -= each
    run: list[int] = []
    for at in [*sorted(rest), -1]:
        if run and at != run[-1] + 1:
            whole = [f"any(need[{run[0]}:{run[-1] + 1}])"]
            terms += whole if len(run) > 2 else [f"need[{each}]" for each in run]
            run = []
        run.append(at)
    return " or ".join(terms)


def wants(step: Fused, found: Demands) -> tuple[Demand, ...] | None:
    """The demand for each output, or None if all are wanted whenever the kernel runs."""
    whole = found.step(step)
    each = tuple(found.of.get(name, frozenset()) & whole for name in step.outputs)
    return None if all(demand == whole for demand in each) else each


def _flags(step: Step, wanted: Iterable[Demand], found: Demands) -> list[str]:
    """For each output of a step that runs, whether it is wanted."""
    whole = found.step(step)
    return ["True" if one == whole else found.condition(one) for one in wanted]


@dataclass(frozen=True)
class WrapperCall:
    """How a kernel is called: the wrapper's name, and the symbols that follow the tensors.

    `in_place`: whether outputs may overwrite inputs, if the driver may do so.
    """

    name: str
    symbols: tuple[str, ...]
    in_place: bool = False


def step_lines(
    plan: Plan,
    found: Demands,
    scope: Scope,
    wrappers: Mapping[Fused, WrapperCall],
    laid_out: frozenset[str],
    kept: frozenset[str],
    saved: frozenset[str] = frozenset(),
) -> list[str]:
    """All steps as lines. `laid_out` values must have their spec's strides; `kept` ones stay, and
    `saved` ones if the driver's parameter says so."""
    live = [step for step in plan.steps if found.step(step)]
    conditions = [found.condition(found.step(step)) for step in live] + ["True"]
    specs = dict(plan.specs)
    small = _small(plan, specs)
    ends = _Ends(found, scope, kept | small, saved - small)
    ended = ends.by_step(live, conditions)
    lines: list[str] = []
    open_condition, later = "True", list[str]()
    for step, wanted, after, (names, others) in zip(
        live, conditions, conditions[1:], ended, strict=False
    ):
        if wanted != open_condition and wanted != "True":
            alternative = open_condition != "True" and wanted == f"not {open_condition}"
            lines.append("else:" if alternative else f"if {wanted}:")
        open_condition = wanted
        own = _one_step(specs, step, found, scope, wrappers, laid_out) + ends.lines(names)
        lines += own if wanted == "True" else indented(own)
        later += others
        if after == "True":
            lines += ends.lines(later)
            later = []
    return lines


@dataclass(frozen=True)
class _Ends:
    """Which values are deleted where: not those that are `kept`. Those that are `saved` go where
    inference runs."""

    found: Demands
    scope: Scope
    kept: frozenset[str]
    saved: frozenset[str]

    def by_step(
        self, live: Sequence[Step], conditions: Sequence[str]
    ) -> list[tuple[list[str], list[str]]]:
        """For each step the values whose last use it is, and those of them that steps of another
        condition use, too: they end behind the conditions."""
        last: dict[str, int] = {}
        under: dict[str, set[str]] = {}
        for index, step in enumerate(live):
            for name in _mentions(step):
                last[name] = index
                under.setdefault(name, set()).add(conditions[index])
        ended: list[tuple[list[str], list[str]]] = []
        for index, step in enumerate(live):
            empty = _empty(step, self.found)
            names = [n for n in _mentions(step) if last[n] == index and n not in empty]
            mixed = {n for n in names if self.found.apart and len(under[n]) > 1}
            ended.append(([n for n in names if n not in mixed], [n for n in names if n in mixed]))
        return ended

    def lines(self, names: Sequence[str]) -> list[str]:
        gone = [self.scope[name] for name in names if name not in self.kept]
        freed = [self.scope[name] for name in names if self._is_freed(name)]
        made = [f"del {', '.join(gone)}"] if gone else []
        return [*made, *(f"{name} = {name} if {SAVES} else None" for name in freed)]

    def _is_freed(self, name: str) -> bool:
        return name in self.saved and self.found.condition(self.found.of[name]) == "True"


def _small(plan: Plan, specs: Mapping[str, TensorSpec]) -> frozenset[str]:
    """Results of kernels that are too small for an early deletion to matter."""
    made = [name for step in plan.kernels for name in step.outputs if name in specs]
    return frozenset(
        name
        for name in made
        if specs[name].numel.is_static
        and specs[name].numel.at({}) * ITEM_BYTES.get(specs[name].dtype, 8) <= SMALL_BYTES
    )


def _mentions(step: Step) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in (*inputs_of(step), *step.outputs) if name))


def _one_step(
    specs: Mapping[str, TensorSpec],
    step: Step,
    found: Demands,
    scope: Scope,
    wrappers: Mapping[Fused, WrapperCall],
    laid_out: frozenset[str],
) -> list[str]:
    match step:
        case Fused():
            return _kernel_lines(step, found, scope, wrappers[step])
        case View():
            return view_lines(step, scope)
        case Call():
            strides = {e: python.dims(specs[e].strides) for e in step.outputs if e in laid_out}
            return _call_lines(step, scope, found, strides)


def _kernel_lines(step: Fused, found: Demands, scope: Scope, wrapper: WrapperCall) -> list[str]:
    args = [scope[name] for name in step.inputs] or ["device"]
    args += wrapper.symbols
    each = wants(step, found)
    if each is not None:
        args.append(f"want={python.row(_flags(step, each, found))}")
    args += [f"{IN_PLACE}={IN_PLACE}"] if wrapper.in_place else []
    targets = [scope[name] if found.of.get(name) else "_" for name in step.outputs]
    return call(", ".join(targets), wrapper.name, args)


def _empty(step: Step, found: Demands) -> frozenset[str]:
    """Outputs of a kernel that hold no memory, because they were not asked for."""
    outputs = step.outputs if isinstance(step, Fused) else ()
    wanted = [(name, found.of.get(name, frozenset())) for name in outputs]
    if found.apart and found.step(step) == found.everything:
        return frozenset(name for name, of in wanted if of != found.everything)
    return frozenset(name for name, of in wanted if not of)


def always_defined(plan: Plan, found: Demands) -> frozenset[str]:
    """The inputs, and the values that steps without a condition make, or those of either branch."""
    of: dict[str, Demand] = {each.name: found.everything for each in plan.inputs}
    for step in plan.steps:
        for name in step.outputs:
            of[name] = of.get(name, frozenset()) | found.step(step)
    return frozenset(name for name, demand in of.items() if demand == found.everything)


def without_last_deletions(lines: Sequence[str]) -> list[str]:
    """The lines before a return, which itself frees what is not returned."""
    kept = list(lines)
    while kept and (kept[-1].startswith("del ") or kept[-1].endswith(f" if {SAVES} else None")):
        kept.pop()
    return kept


def view_lines(step: View, scope: Scope) -> list[str]:
    """A view. To select one of several results is an index."""
    if step.node.op == "getitem":
        source, position = step.node.refs()[0], step.node.args[1]
        return [f"{scope[step.name]} = {scope[source]}[{int(str(position))}]"]
    index = python.sliced(step.node, scope) if step.node.op == "aten.slice.Tensor" else None
    if index is not None:
        return [f"{scope[step.name]} = {index}"]
    return call(scope[step.name], *python.operator(step.node, scope))


def _call_lines(step: Call, scope: Scope, found: Demands, strides: Mapping[str, str]) -> list[str]:
    """A call of PyTorch. Results that have `strides` get them."""
    if step.node.op == LITERAL and step.node.spec is not None:
        name, _ = python.tensor_literal(step.node)
        device = python.device_text(step.node.spec.device, scope)
        return _laid_out([f"{scope[step.outputs[0]]} = _fw_here(*{name}, {device})"], step, strides)
    if step.node.op == ALLOWED:
        return [f"{scope[step.outputs[0]]} = _fw_conv_tf32(device)"]
    callee, args = python.operator(step.node, scope)
    if step.node.layer:
        callee, args = _layer(step, args, found)
    elif step.node.is_masked:
        args = [*args[:-1], _mask(step, found, 3)]
    if not any(step.outputs):
        return call("", callee, args)
    if step.node.spec is not None:
        if len(step.outputs) != 1:
            raise GraphError(f"{step.name} has one result but {len(step.outputs)} names")
        return _laid_out(call(scope[step.outputs[0]], callee, args), step, strides)
    targets = [scope[name] if name else "_" for name in step.outputs]
    # There may be more results, and `_` must not keep them alive.
    which = "0" if len(targets) == 1 else f":{len(targets)}"
    lines = [f"{each}[{which}]" for each in call(", ".join(targets), callee, args)]
    lines += ["del _"] if "_" in targets else []
    results = {scope[name]: text for name, text in strides.items()}
    return [*lines, *(f"{name} = _fw_laid_out({name}, {text})" for name, text in results.items())]


def _laid_out(lines: list[str], step: Call, strides: Mapping[str, str]) -> list[str]:
    """The line of a step with one result, whose strides are then those that it must have."""
    wanted = strides.get(step.outputs[0])
    target, _, value = lines[0].partition(" = ")
    return lines if wanted is None else [f"{target} = _fw_laid_out({value}, {wanted})"]


def _layer(step: Call, args: list[str], found: Demands) -> tuple[str, list[str]]:
    """The run time's function for a recurrent layer, or for its gradients."""
    kind = python.quoted(step.node.layer)
    if step.node.is_masked:
        grads, tape, *rest = args
        return "_fw_recurrent_backward", [_mask(step, found), grads, tape, kind, *rest]
    results = 3 if step.node.layer == "lstm" else 2
    record = any(step.outputs[results:])  # Another step reads the tape.
    return "_fw_recurrent", [str(record), kind, *args]


def _mask(step: Call, found: Demands, count: int = 0) -> str:
    """Which gradients are wanted. The others are not computed."""
    wanted = [found.of.get(name, frozenset()) if name else frozenset() for name in step.outputs]
    wanted += [frozenset()] * (count - len(wanted))
    return f"[{', '.join(_flags(step, wanted, found))}]"


def read_by_loops(plan: Plan, seeds: Iterable[str] = ()) -> frozenset[str]:
    """`seeds` and the values that kernels read, with the values of which these are views."""
    read = set(seeds)
    for step in reversed(plan.steps):
        if isinstance(step, Fused):
            read.update(step.inputs)
        elif isinstance(step, View) and step.name in read:
            read.update(inputs_of(step))
    return frozenset(read)


def literals_of(plan: Plan) -> list[Node]:
    """The constant tensors of the plan's graph."""
    calls = [step for step in plan.steps if isinstance(step, Call)]
    return [step.node for step in calls if step.node.op == LITERAL]


def names_of(plan: Plan) -> Sequence[str]:
    """Every value of the plan, inputs first."""
    made = [name for step in plan.steps for name in step.outputs if name]
    return [each.name for each in plan.inputs] + made
