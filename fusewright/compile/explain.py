"""`explain`: gathers what is known about an optimized module, when somebody asks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from fusewright.capture.breaks import GraphBreak, breaks_in, limit_reached
from fusewright.capture.source_location import of_expression
from fusewright.compile.engine import FACTS, Engine, engine_of
from fusewright.compile.explanation import Explanation, GraphFacts, counted
from fusewright.compile.front import dynamo_graphs
from fusewright.compile.original import original, original_class
from fusewright.compile.replayed import REPLAYED
from fusewright.errors import ProblemError

_PLACE = re.compile(r"\S+:\d+: ")
_LOST = "it could not be captured; a pickle does not keep the reason"


def explain(module: Any) -> Explanation:
    """What is fused in an optimized module, what is not, and what became of its calls so far."""
    engine = engine_of(module)
    if engine is None:
        how = "give it the module that fusewright.optimize returned"
        raise ProblemError(f"explain knows nothing of this {type(module).__name__}; {how}")
    record, source = engine.record, engine.source
    named = (engine.reason, *record.reasons_unguarded())
    # A capture that failed was not for want of a guard.
    unguarded = tuple(placed(module, each) for each in named if each and not is_of_capture(each))
    return Explanation(
        model=original_class(module).__name__,
        torch_compile=engine.reason,
        graphs=tuple(_graphs(module, engine)),
        breaks=breaks_of(module, engine),
        unguarded=tuple(dict.fromkeys(unguarded)),
        left_out=source.left_out if source else tuple((m, _LOST) for m in sorted(engine.left_out)),
        fallbacks=counted(record.fallbacks()),
        recompilations=counted(record.recompilations()),
        limit=limit_reached(original_class(module).forward),
        replays=tuple(dict.fromkeys(_replays(module, engine))),
    )


def breaks_of(module: nn.Module, engine: Engine) -> tuple[GraphBreak, ...]:
    """The graph breaks of the calls that went through Dynamo."""
    kind = original_class(module)
    graphs = dynamo_graphs(kind)
    found = [each.broken for each in graphs if each.broken is not None]
    if engine.reason or graphs:
        # Dynamo also breaks where it has no graph to hand over yet.
        found += breaks_in(kind.forward)
    return tuple(dict.fromkeys(found))


def _graphs(module: nn.Module, engine: Engine) -> Iterator[GraphFacts]:
    for mode in list(engine.modes):
        yield from vars(mode).get(FACTS, ())
    for traced in dynamo_graphs(original_class(module)):
        yield from traced.graphs


def _replays(module: nn.Module, engine: Engine) -> Iterator[str]:
    for mode in list(engine.modes):
        for part in vars(mode).get(REPLAYED, ()):
            yield f"{'train' if mode.training else 'eval'} mode, {part}"
    for traced in dynamo_graphs(original_class(module)):
        for part in traced.replays:
            yield f"{traced.mode} mode, captured by Dynamo, {part}"


def placed(module: nn.Module, reason: str) -> str:
    """The reason with the line that it is about, if that can be found."""
    # The reasons are "forward reads self.settings" and "forward asks torch.is_grad_enabled()", or
    # those of a capture, which begin with their place.
    if is_of_capture(reason):
        return reason
    place = of_expression(original(module), reason.split(" ", 2)[-1])
    return f"{place}: {reason}" if place else reason


def is_of_capture(reason: str) -> bool:
    """Whether a capture failed for this reason. It then begins with its place."""
    return _PLACE.match(reason) is not None
