"""Functions that the host computes for a whole run of lanes, between loops over lanes.

`kernels/host/` has them in vector instructions that g++ does not generate from a loop
(`ScalarOp.run`). A run of lanes is computed in stages. A loop writes a function's operands to a
buffer, the function replaces them by its results, and the loop of the next stage reads these. A
value that two stages need is also kept in a buffer, or loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusewright.codegen.access import goes_wide, loaded_slots, stored_slots
from fusewright.codegen.accumulators import accumulator, half_operand_of, takes_vectors
from fusewright.codegen.form import Form
from fusewright.codegen.lanes import (
    Computed,
    guarded_loops,
    has_run,
    indented,
    is_staged,
    run_text,
    words,
)
from fusewright.ir.loop import Apply, Load, Reduce, Store
from fusewright.schedule.choice import HOST_RUN

Compute = Callable[[Computed, bool], list[str]]
MOST_INLINED = 4  # functions that are inlined into a row's loop
# Several loops over a long run read memory and compute alternately, not at the same time (gelu of
# 1 M floats on one thread: 650 instead of 540 us). In still shorter runs, the starts and ends of
# loops take 4 %.
SHORT_RUN = 256


@dataclass(frozen=True)
class Ends:
    """Pointers to loaded and stored values whose lanes are contiguous, in the register type."""

    loaded: Mapping[str, str]
    stored: Mapping[str, str]


NOWHERE = Ends({}, {})


def lanes_of_run(form: Form, items: list[Computed]) -> int:
    """The number of lanes of a pointwise kernel's run.

    A single function that reads and writes memory itself gets long runs, because each call has a
    start-up cost (float64 erfc of 512 k: 1.05 of eager's time with runs of 256, 0.95 with 512 or
    more).
    """
    several = is_staged(form, items) or goes_wide(form, items)
    return SHORT_RUN if several and not _is_straight(form, items) else HOST_RUN


def _is_straight(form: Form, items: list[Computed]) -> bool:
    made = [item for item in items if isinstance(item, Apply)]
    stores = [item for item in form.kernel.body if isinstance(item, Store)]
    if len(made) != 1 or len(stores) != 1 or not has_run(form, made[0]):
        return False
    read, written = loaded_slots(form, items), stored_slots(form, stores)
    return made[0].operands[0] in read and made[0].name in written


@dataclass(frozen=True)
class _Stages:
    """The stage of each computed value, the results of functions, and what each stage reads.

    `buffers` are the buffers of values. If a result is only stored, its buffer is the output. Then
    (`straight`) no loop follows the last function.
    """

    of: Mapping[str, int]
    runs: frozenset[str]
    reads: tuple[frozenset[str], ...]
    buffers: Mapping[str, str]
    straight: bool

    def imported(self, at: int) -> set[str]:
        """The values of earlier stages that a stage reads."""
        return {name for name in self.reads[at] if self.of.get(name, at) < at}


def staged_loops(
    form: Form,
    items: list[Computed],
    compute: Compute,
    before: list[str],
    after: list[str],
    read_back: frozenset[str] = frozenset(),
    ends: Ends = NOWHERE,
    summed: frozenset[str] = frozenset(),
) -> list[str]:
    """`before`, the items and `after` for every lane. Values that are `read_back` are not computed.
    Results of functions that are `summed` afterwards stay in buffers."""
    stages = _stages(form, items, after, read_back, ends, summed)
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
        lines += [_call(form, i, stages, ends) for i in now if _starts(i, at, stages)]
    return lines


def _handed(form: Form, item: Computed, at: int, stages: _Stages, ends: Ends) -> list[str]:
    """The statement that writes an operand to its function's buffer, or reads a buffered value."""
    buffer = stages.buffers[item.name]
    if not _starts(item, at, stages):
        return [f"const {form.register(item.name)} {form.names[item.name]} = {buffer}[v];"]
    assert isinstance(item, Apply)
    (operand,) = item.operands
    return [] if operand in ends.loaded else [f"{buffer}[v] = {form.names[operand]};"]


def _starts(item: Computed, at: int, stages: _Stages) -> bool:
    return item.name in stages.runs and stages.of[item.name] == at


def _call(form: Form, item: Computed, stages: _Stages, ends: Ends) -> str:
    assert isinstance(item, Apply)
    to = stages.buffers[item.name]
    # A row's runs are a few vectors long. Without inlining, each call would load its constants
    # again, which took a third of the time.
    inlined = "<true>" if form.is_row and len(stages.runs) <= MOST_INLINED else ""
    return f"fw::{item.op}_run{inlined}({ends.loaded.get(item.operands[0], to)}, {to}, n);"


def _stages(
    form: Form,
    items: list[Computed],
    after: list[str],
    read_back: frozenset[str],
    ends: Ends,
    summed: frozenset[str],
) -> _Stages:
    """Assign stages: functions as early as possible, other values as late as possible, so that few
    values need a buffer."""
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
    mentioned = words(after)
    reads = [set[str]() for _ in range(last)]
    reads.append({i.name for i in items if form.names[i.name] in mentioned})
    for name, item in made.items():
        reads[stage[name]].update(item.operands)
    # Only with a single store: another output might overlap an input that is still to be read.
    straight = len(after) == 1 and reads[last] <= (runs - summed) & ends.stored.keys()
    found = _Stages(stage, runs, tuple(map(frozenset, reads)), {}, straight)
    buffered = runs.union(*map(found.imported, range(last + 1)))
    buffers = {name: _buffer(form, name) for name in made if name in buffered}
    if straight:
        buffers |= {name: ends.stored[name] for name in reads[last]}
    return replace(found, buffers=buffers)


def _buffer(form: Form, name: str) -> str:
    return f"{form.names[name]}_kept" if name in form.kept else f"{form.names[name]}_run"


@dataclass(frozen=True)
class Sums:
    """Statements that reduce a run: before the loops, lane by lane in the last one, and after."""

    before: tuple[str, ...]
    by_lane: tuple[str, ...]
    after: tuple[str, ...]
    summed: frozenset[str]


def pair_lines(form: Form) -> list[str]:
    """Statements that add two rows at once to columns. None if a kernel does more than sum loaded
    floats."""
    items = [item for item in form.kernel.body if isinstance(item, Load)]
    slots = loaded_slots(form, items)
    reductions = form.plan.reductions[0]
    plain = all(r.kind == "sum" and r.operand in slots for r in reductions)
    floats = all(form.register(r.operand) == "float" for r in reductions)
    alone = form.schedule.kind == "column" and not form.plan.inner_stores
    if form.language != "host" or not (reductions and plain and floats and alone):
        return []
    lines = []
    for at, each in enumerate(reductions):
        first = slots[each.operand]
        second = "next" + first.removeprefix("elem")
        lines.append(f"{accumulator(at)}.add_two({first}, {second}, n);")
    return lines


def sum_lines(
    form: Form, reductions: Sequence[Reduce], made: Iterable[Computed], ends: Ends
) -> Sums:
    """How a sweep reduces a run. On the host, float sums read their operands from memory: from the
    input, or from the buffer of the function that computes them. On a GPU, the lanes of a thread
    are added at once."""
    runs = frozenset(i.name for i in made if isinstance(i, Apply) and has_run(form, i))
    add = "add_pairs" if form.is_row else "add_run"
    before, by_lane, after = list[str](), list[str](), list[str]()
    for at, item in enumerate(reductions):
        name, operand, acc = form.names[item.name], item.operand, accumulator(at)
        if half_operand := half_operand_of(form, item):
            before.append(f"fw::add_half_pairs({acc}, elem.{form.names[half_operand]});")
            continue
        if takes_vectors(form, item):
            before.append(f"{form.register(operand)} {name}_lanes[V];")
            by_lane.append(f"{name}_lanes[v] = {form.names[operand]};")
            after.append(f"{acc}.add_all({name}_lanes);")
            continue
        direct = item.kind == "sum" and form.register(operand) == "float"
        if direct and operand in ends.loaded:
            before.append(f"{acc}.{add}({ends.loaded[operand]}, n);")
        elif direct and operand in runs:
            after.append(f"{acc}.{add}({_buffer(form, operand)}, n);")
        else:
            by_lane.append(f"{acc}.add(v, {form.names[operand]});")
    summed = runs & {item.operand for item in reductions}
    return Sums(tuple(before), tuple(by_lane), tuple(after), summed)
