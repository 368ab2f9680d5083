"""Many records in a few figures: how speed-ups spread over problems, and what to look at first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from fusewright.bench.record import PRECISIONS, Collection, Pass, Ratio, Record, Result, Spread

THRESHOLDS = (1.0, 1.5, 2.0, 4.0)


def collect(records: Sequence[Record]) -> Collection:
    """The records with their spreads, the worst problems first."""
    ordered = sorted(records, key=_badness)
    return Collection(tuple(ordered), spreads(ordered))


def spreads(records: Sequence[Record]) -> tuple[Spread, ...]:
    """Speed-ups of every candidate that is no baseline against every baseline, by pass."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        for each in record.passes:
            for result in each.results:
                if result.candidate not in record.subjects:
                    continue
                for ratio in _fair(each, result):
                    key = (each.name, _label(record, result), ratio.baseline)
                    found.setdefault(key, []).append(ratio.ratio)
    return tuple(_spread(*key, ratios, len(records)) for key, ratios in found.items())


def _fair(measured: Pass, result: Result) -> list[Ratio]:
    """Ratios to baselines that are not finer than the result: less work is no speed-up."""
    classes = {each.candidate: each.precision for each in measured.results}
    own = _rank(result.precision)
    return [each for each in result.ratios if own <= _rank(classes.get(each.baseline, ""))]


def _rank(precision: str) -> int:
    return PRECISIONS.index(precision) if precision in PRECISIONS else len(PRECISIONS)


def wrong_results(record: Record) -> list[tuple[str, Result]]:
    """Results of ours and foreign candidates that got no time, with the name of their pass."""
    return [
        (each.name, result)
        for each in record.passes
        for result in each.results
        if result.status in ("wrong", "failed") and result.candidate in record.subjects
    ]


def is_good(record: Record) -> bool:
    """Whether everything but the baselines was right and has its times."""
    return record.status == "ok" and not wrong_results(record)


def _label(record: Record, result: Result) -> str:
    kinds = {each.name: each.kind for each in record.candidates}
    # Foreign files of many problems have many names, and are one author's candidate.
    return "foreign" if kinds.get(result.candidate) == "foreign" else result.candidate


def _spread(
    pass_name: str, candidate: str, baseline: str, ratios: Sequence[float], problems: int
) -> Spread:
    logs = [math.log(each) for each in ratios]
    shares = {f"{t:g}": sum(each > t for each in ratios) / len(ratios) for t in THRESHOLDS}
    mean, middle = math.exp(statistics.fmean(logs)), statistics.median(ratios)
    return Spread(
        pass_name, candidate, baseline, len(ratios), mean, middle, shares, problems=problems
    )


def _badness(record: Record) -> tuple[int, float, str]:
    """Those that did not finish, then wrong ones, then the slowest against their best baseline."""
    rank = 2 if is_good(record) else (0 if record.status != "ok" else 1)
    ratios = [
        ratio.ratio
        for each in record.passes
        for result in each.results
        if result.candidate in record.subjects
        for ratio in result.ratios
    ]
    return rank, min(ratios, default=math.inf), record.problem.name
