"""Many records in a few figures: the spread of speedups, and the problems in order of urgency."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from fusewright.bench.record import Collection, Pass, Ratio, Record, Result, Spread
from fusewright.verify.classes import coarseness

THRESHOLDS = (1.0, 1.5, 2.0, 4.0)


def collect(records: Sequence[Record]) -> Collection:
    """The records with their spreads, the worst problems first."""
    ordered = sorted(records, key=_badness)
    return Collection(tuple(ordered), spreads(ordered))


def spreads(records: Sequence[Record]) -> tuple[Spread, ...]:
    """Speedups of every other candidate against every baseline, by pass."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        for each, result in record.judged:
            for ratio in _fair(each, result):
                key = (each.name, _label(record, result), ratio.baseline)
                found.setdefault(key, []).append(ratio.ratio)
    return tuple(_spread(*key, ratios, len(records)) for key, ratios in found.items())


def _fair(measured: Pass, result: Result) -> list[Ratio]:
    """Ratios to baselines that are not finer than the result: less work is no speedup."""
    classes = {each.candidate: coarseness(each.precision) for each in measured.results}
    own, last = coarseness(result.precision), coarseness("")
    return [each for each in result.ratios if own <= classes.get(each.baseline, last)]


def wrong_results(record: Record) -> list[tuple[str, Result]]:
    """Results without a time of ours and of foreign candidates, with the name of their pass."""
    return [(p.name, r) for p, r in record.judged if r.status in ("wrong", "failed")]


def is_good(record: Record) -> bool:
    """Whether every candidate except the baselines is right and has its times."""
    return record.status == "ok" and not wrong_results(record)


def _label(record: Record, result: Result) -> str:
    kinds = {each.name: each.kind for each in record.candidates}
    # The foreign files of many problems have many names, but count as one candidate.
    return "foreign" if kinds.get(result.candidate) == "foreign" else result.candidate


def _spread(
    pass_name: str, candidate: str, baseline: str, ratios: Sequence[float], problems: int
) -> Spread:
    logs = [math.log(each) for each in ratios]
    shares = {f"{t:g}": sum(each > t for each in ratios) / len(ratios) for t in THRESHOLDS}
    mean, middle = math.exp(statistics.fmean(logs)), statistics.median(ratios)
    return Spread(pass_name, candidate, baseline, len(ratios), mean, middle, shares, problems)


def _badness(record: Record) -> tuple[int, float, str]:
    """Unfinished problems first, then wrong ones, then the slowest against their best baseline."""
    rank = 2 if is_good(record) else (0 if record.status != "ok" else 1)
    ratios = [each.ratio for _, result in record.judged for each in result.ratios]
    return rank, min(ratios, default=math.inf), record.problem.name
