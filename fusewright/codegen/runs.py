"""Functions that the host computes for a run of lanes at once, between loops over lanes.

`kernels/` has them in vector instructions that g++ makes of no loop (`ScalarOp.run`). A run of
lanes is taken in stages: a loop leaves a function's operands in a buffer, the function turns the
buffer into its results, and the loop of the next stage reads them. What two stages need waits in a
buffer too, or is loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from fusewright.codegen.accumulators import sums_lanes
from fusewright.codegen.form import Form
from fusewright.codegen.lanes import Computed, guarded_loops, has_run, indented, run_text, words
from fusewright.loop import Apply, Reduce

Compute = Callable[[Computed, bool], list[str]]


@dataclass(frozen=True)
class Ends:
    """Where loaded and stored values lie, lane beside lane, in the type of registers."""

    loaded: Mapping[str, str]
    stored: Mapping[str, str]


NOWHERE = Ends({}, {})


@dataclass(frozen=True)
class _Stages:
    """The stage of each computed value, the functions' results, and what each stage reads.

    `buffers` are where values wait; a result that is only stored waits where it is stored.
    """

    of: Mapping[str, int]
    runs: frozenset[str]
    reads: tuple[frozenset[str], ...]
    buffers: Mapping[str, str]
    straight: bool

    def imported(self, at: int) -> set[str]:
        """What a stage reads of those before it."""
        return {name for name in self.reads[at] if self.of.get(name, at) < at}


def staged_loops(
    form: Form,
    items: list[Computed],
    compute: Compute,
    before: list[str],
    after: list[str],
    read_back: frozenset[str] = frozenset(),
    ends: Ends = NOWHERE,
) -> list[str]:
    """`before`, the items and `after` for every lane; what is read back is not computed."""
    stages = _stages(form, items, after, read_back, ends)
    if not stages.runs:
        return guarded_loops(form, items, compute, before, after, read_back)
    lines = [
        f"{form.register(name)} {buffer}[{run_text(form)}];"
        for name, buffer in stages.buffers.items()
        if name not in form.kept and buffer != ends.stored.get(name)
    ]
    last = len(stages.reads) - 1
    for at in range(last + (not stages.straight)):
        now = [i for i in items if stages.of.get(i.name) == at or i.name in stages.reads[at]]

        def staged(item: Computed, near: bool, at: int = at) -> list[str]:
            if at != stages.of.get(item.name, at) or item.name in stages.runs:
                return _handed(form, item, at, stages, ends)
            buffer = stages.buffers.get(item.name)
            held = buffer is not None and item.name not in form.kept
            keep = [f"{buffer}[v] = {form.names[item.name]};"] if held else []
            return [*compute(item, near), *keep]

        known = read_back | stages.runs | stages.imported(at)
        loops = guarded_loops(form, now, staged, before, after if at == last else [], known)
        lines += ["{", *indented(loops), "}"] if "int32_t far = 0;" in loops else loops
        lines += [_call(i, stages, ends) for i in now if _starts(i, at, stages)]
    return lines


def _handed(form: Form, item: Computed, at: int, stages: _Stages, ends: Ends) -> list[str]:
    """A value's way into its function's buffer, or out of the buffer it waits in."""
    buffer = stages.buffers[item.name]
    if not _starts(item, at, stages):
        return [f"const {form.register(item.name)} {form.names[item.name]} = {buffer}[v];"]
    assert isinstance(item, Apply)
    (operand,) = item.operands
    return [] if operand in ends.loaded else [f"{buffer}[v] = {form.names[operand]};"]


def _starts(item: Computed, at: int, stages: _Stages) -> bool:
    return item.name in stages.runs and stages.of[item.name] == at


def _call(item: Computed, stages: _Stages, ends: Ends) -> str:
    assert isinstance(item, Apply)
    to = stages.buffers[item.name]
    return f"fw::{item.op}_run({ends.loaded.get(item.operands[0], to)}, {to}, n);"


def _stages(
    form: Form,
    items: list[Computed],
    after: list[str],
    read_back: frozenset[str],
    ends: Ends,
) -> _Stages:
    """Functions as early as they can be, other values as late: what they read is at hand then."""
    made = {i.name: i for i in items if isinstance(i, Apply) and i.name not in read_back}
    runs = frozenset(name for name, item in made.items() if has_run(form, item))
    early: dict[str, int] = {}
    for name, item in made.items():
        stages = (early[each] + (each in runs) for each in item.operands if each in made)
        early[name] = max(stages, default=0)
    last = max((1 + early[name] for name in runs), default=0)
    stage = {name: early[name] if name in runs else last for name in made}
    for name, item in reversed(made.items()):
        for each in item.operands:
            if each in made and each not in runs:
                stage[each] = min(stage[each], stage[name])
    spoken = words(after)
    reads = [set[str]() for _ in range(last)]
    reads.append({i.name for i in items if form.names[i.name] in spoken})
    for name, item in made.items():
        reads[stage[name]].update(item.operands)
    # One result, written as it is: what else a kernel stores might be memory that it loads.
    straight = len(after) == 1 and reads[last] <= runs and reads[last] <= ends.stored.keys()
    found = _Stages(stage, runs, tuple(map(frozenset, reads)), {}, straight)
    waiting = runs.union(*map(found.imported, range(last + 1)))
    buffers = {
        name: f"{form.names[name]}_kept" if name in form.kept else f"{form.names[name]}_run"
        for name in made
        if name in waiting
    }
    if straight:
        buffers |= {name: ends.stored[name] for name in reads[last]}
    return replace(found, buffers=buffers)


def sum_lines(
    form: Form, reductions: Iterable[Reduce], ends: Ends
) -> tuple[list[str], list[str], list[str]]:
    """How reductions take a run, before, in and after the loop over its lanes: sums of floats from
    where these were loaded or on a GPU together, others by lanes."""
    apart, adds, after = [], [], []
    for item in reductions:
        name, operand = form.names[item.name], item.operand
        if sums_lanes(form, item):
            apart.append(f"float {name}_lanes[V];")
            adds.append(f"{name}_lanes[v] = {form.names[operand]};")
            after.append(f"acc.{name}.add_all({name}_lanes);")
            continue
        direct = item.kind == "sum" and form.register(operand) == "float"
        if direct and operand in ends.loaded:
            apart.append(f"acc.{name}.add_run({ends.loaded[operand]}, n);")
        else:
            adds.append(f"acc.{name}.add(v, {form.names[operand]});")
    return apart, adds, after
