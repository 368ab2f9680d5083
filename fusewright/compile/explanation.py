"""What an optimized module does with its calls, as a value and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusewright.capture.breaks import GraphBreak
from fusewright.emit.bundle import ProgramPlans
from fusewright.emit.steps import LITERAL
from fusewright.ir.graph import Program
from fusewright.plan.steps import Call, Plan

_PARTS = {
    "forward": "forward with gradients",
    "inference": "forward without gradients",
    "backward": "backward",
}


@dataclass(frozen=True)
class FusedKernel:
    """A kernel of ours, and the operators that it computes, in order."""

    name: str
    operators: tuple[str, ...]

    def __str__(self) -> str:
        return f"fused  {self.name}: {' → '.join(self.operators) or 'copy'}"


@dataclass(frozen=True)
class TorchCall:
    """An operator that stays a PyTorch call, and why."""

    operator: str
    reason: str

    def __str__(self) -> str:
        return f"call   {self.operator}: {self.reason}"


@dataclass(frozen=True)
class GraphFacts:
    """One compiled graph.

    `mode` is train or eval: that of the call for which it was compiled. `part` is forward,
    inference (forward without gradients) or backward. `inputs` are the tensors of the call, such
    as "x: float32[s0, 64]"; `sizes` are the values of its symbols in that call. `autocast` is the
    dtype of autocast, empty if it was off. `by_dynamo`: Dynamo captured and guards the graph.
    `refused` says why PyTorch runs it, operator by operator; it is empty if our kernels do.
    """

    mode: str
    part: str
    inputs: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    fused: tuple[FusedKernel, ...] = ()
    calls: tuple[TorchCall, ...] = ()
    autocast: str = ""
    by_dynamo: bool = False
    refused: str = ""

    @property
    def kernels(self) -> int:
        """How many kernels of ours one run launches."""
        return len(self.fused)

    @property
    def title(self) -> str:
        """All but the mode, in one line."""
        known = ", ".join(f"{name} = {size}" for name, size in self.sizes)
        given = f" of {', '.join(self.inputs)}" if self.inputs else ""
        cast = f"autocast to {self.autocast}" if self.autocast else ""
        front = "captured by Dynamo" if self.by_dynamo else ""
        facts = "; ".join(each for each in (known, cast, front, _counted(self)) if each)
        return f"{_PARTS[self.part]}{given} ({facts})"

    def lines(self) -> Iterator[str]:
        """What runs, step by step."""
        if self.refused:
            yield f"PyTorch runs it, operator by operator: {self.refused}"
        yield from map(str, self.fused)
        yield from map(str, self.calls)


@dataclass(frozen=True)
class Explanation:
    """What became of a model and of the calls so far. `str()` says it in words.

    `torch_compile` says why all calls go through torch.compile; empty if they do not. `breaks` are
    Dynamo's graph breaks. `unguarded` is what no guard of a file could compare. `left_out` are
    modes without a graph, `fallbacks` calls that ran the original forward, and `recompilations`
    new kernels for a call: each with the reason, the last two with their number. `limit`: Dynamo
    has compiled forward this often, and runs the original forward for calls that need another
    graph; None if it can compile more. `replays`, in the mode reduce-overhead: how many CUDA graphs
    each part has, and why some calls have none.
    """

    model: str
    torch_compile: str
    graphs: tuple[GraphFacts, ...]
    breaks: tuple[GraphBreak, ...]
    unguarded: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    fallbacks: tuple[tuple[str, int], ...]
    recompilations: tuple[tuple[str, int], ...]
    limit: int | None = None
    replays: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        kernels, calls = sum(g.kernels for g in self.graphs), sum(len(g.calls) for g in self.graphs)
        yield (
            f"{self.model}: {_number(len(self.graphs), 'graph')}, "
            f"{_number(kernels, 'fused kernel')}, {_number(calls, 'PyTorch call')}"
        )
        if self.torch_compile:
            yield f"  torch.compile runs all calls: {self.torch_compile}"
            if not self.graphs:
                yield "  it compiles its graphs at the first call"
        for title, lines in _grouped(self.graphs):
            yield from ("", title, *(f"  {line}" for line in lines))
        yield ""
        yield from _section("graph breaks", map(str, self.breaks))
        yield from _section("read by forward, beyond what a file can check", self.unguarded)
        yield from _section("modes without a graph", (f"{m}: {why}" for m, why in self.left_out))
        yield from _section("calls that ran the original forward", _times(self.fallbacks))
        yield from _section("recompilations", _times(self.recompilations))
        if self.replays:
            yield from _section("CUDA graphs", self.replays)
        if self.limit is not None:
            often = f"torch.compile has compiled forward {self.limit} times, which is its limit"
            yield f"  {often}: a call that needs another graph runs the original forward"


def facts_of(plans: ProgramPlans, autocast: str) -> tuple[GraphFacts, ...]:
    """The graphs of one program of ours."""
    program = plans.program
    given = tuple(_arguments(program))
    sizes = tuple(program.example_sizes.items())
    return tuple(
        GraphFacts(program.mode, part, given, sizes, *steps_of(plan), autocast=autocast)
        for part, plan in plans.named
    )


def steps_of(plan: Plan) -> tuple[tuple[FusedKernel, ...], tuple[TorchCall, ...]]:
    """The kernels of a plan, and its PyTorch calls."""
    calls = [step for step in plan.steps if isinstance(step, Call) and step.node.op != LITERAL]
    return (
        tuple(FusedKernel(step.name, step.operators) for step in plan.kernels),
        tuple(TorchCall(step.node.op, step.reason) for step in calls),
    )


def _arguments(program: Program) -> Iterator[str]:
    for each, binding in zip(program.inference.inputs, program.bindings, strict=True):
        if binding.kind == "input":
            yield f"{each.name}: {each.spec}"


def _counted(graph: GraphFacts) -> str:
    words = _number(graph.kernels, "kernel")
    return f"{words}, {_number(len(graph.calls), 'PyTorch call')}" if graph.calls else words


def _grouped(graphs: Sequence[GraphFacts]) -> Iterator[tuple[str, list[str]]]:
    """The graphs in words. Equal ones of both modes are said once."""
    modes: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for each in graphs:
        modes.setdefault((each.title, tuple(each.lines())), []).append(each.mode)
    for (title, lines), found in modes.items():
        distinct = dict.fromkeys(found)
        often = f", {len(found)} times" if len(found) > len(distinct) else ""
        named = f"{' and '.join(distinct)} mode, " if any(distinct) else ""
        yield f"{named}{title}{often}", list(lines)


def _section(title: str, rows: Iterator[str] | Sequence[str]) -> Iterator[str]:
    found = [line for row in rows for line in f"  {row}".replace("\n", "\n  ").split("\n")]
    yield f"{title}: none" if not found else f"{title}:"
    yield from found


def _times(counts: Sequence[tuple[str, int]]) -> Iterator[str]:
    for reason, count in counts:
        yield f"{_number(count, 'time')}: {reason}"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def counted(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Reasons with their numbers, the most frequent first."""
    return tuple(sorted(counts.items(), key=lambda each: -each[1]))
