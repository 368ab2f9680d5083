"""The plan as a picture: one box per step in launch order, with the operators that it fuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusewright.bench.record import PlanGraph, PlanStep, Record
from fusewright.kinds.registry import words_of
from fusewright.page.figures import bytes_text, count_text, time_text
from fusewright.page.markup import Html, joined, tag
from fusewright.report import GRAPH_TITLES

_MOST_VALUES = 12
_WORDS = {"call": "PyTorch call", "view": "view, free"}


def plan_picture(record: Record) -> Html:
    """One row of boxes for each graph. Graphs with the same steps share a row."""
    rows: dict[tuple[PlanStep, ...], list[PlanGraph]] = {}
    for each in record.plan:
        rows.setdefault(each.steps, []).append(each)
    legend = tag(
        "p",
        tag("span", "our kernel", class_="key fused"),
        tag("span", "PyTorch call", class_="key call"),
        tag("span", "view, costs nothing", class_="key view"),
        class_="keys",
    )
    times = _times(record)
    drawn = [_row(graphs, times) for graphs in rows.values()]
    return joined((legend, *drawn)) if rows else Html("")


def _times(record: Record) -> dict[tuple[str, str], float]:
    """Times by graph and step. A name that occurs twice is left out: its times are ambiguous."""
    found: dict[tuple[str, str], list[float | None]] = {}
    for step in (step for _, result in record.results for step in result.steps):
        found.setdefault((step.graph, step.step), []).append(step.time_us)
    return {key: us[0] for key, us in found.items() if len(us) == 1 and us[0] is not None}


def _row(graphs: Sequence[PlanGraph], times: dict[tuple[str, str], float]) -> Html:
    first = graphs[0]
    title = " and ".join(
        f"{each.mode} mode, {GRAPH_TITLES.get(each.graph, each.graph)}" for each in graphs
    )
    costing = [each for each in first.steps if each.kind != "view"]
    fused = sum(each.kind != "call" for each in costing)
    counts = f"our kernels: {fused}, PyTorch calls: {len(costing) - fused}"
    boxes = [
        tag("li", _box(each, first, times.get((first.graph, each.name)))) for each in first.steps
    ]
    heading = tag("h4", title, " ", tag("small", counts))
    return joined((heading, tag("ol", *boxes, class_="plan")))


def _box(step: PlanStep, graph: PlanGraph, time_us: float | None) -> Html:
    kind = step.kind if step.kind in ("call", "view") else "fused"
    operators = [tag("li", _short(each), title=each) for each in step.operators]
    sizes = [bytes_text(step.bytes), f"{count_text(step.operations)} op"] if kind != "view" else []
    sizes += [time_text(time_us)] if time_us is not None else []
    parts = [
        tag("b", step.name),
        tag("small", _WORDS.get(step.kind) or words_of(step.kind)),
        tag("ul", *operators),
        tag("small", " · ".join(sizes)) if sizes else "",
        tag("small", f"not fused: {step.reason}", class_="reason") if step.reason else "",
    ]
    tip = "\n".join(_lines(step, graph))
    return tag("div", *parts, class_=f"step {kind}", tabindex=0, data_tip=tip)


def _short(operator: str) -> str:
    """aten.add.Tensor → add. The tooltip shows the overload."""
    parts = operator.split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else operator


def _lines(step: PlanStep, graph: PlanGraph) -> Iterator[str]:
    yield f"{step.name} ({step.kind})"
    yield from _values("reads", step.reads, graph)
    yield from _values("writes", step.writes, graph)
    yield f"{bytes_text(step.bytes)} moved, {count_text(step.operations)} operations"


def _values(verb: str, names: Sequence[str], graph: PlanGraph) -> Iterator[str]:
    for name in names[:_MOST_VALUES]:
        yield f"{verb} {name}: {graph.values.get(name, 'unknown shape')}"
    if len(names) > _MOST_VALUES:
        yield f"{verb} {len(names) - _MOST_VALUES} more"
