"""Two runs beside each other: what got faster or slower by more than the samples' own noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusewright.bench.record import PRECISIONS, Environment, Record, Result
from fusewright.bench.stats import Interval, change

# Two processes never see quite the same clocks and addresses, however narrow their intervals.
BETWEEN_RUNS = 0.02


@dataclass(frozen=True)
class Change:
    """One candidate in one pass of one problem.

    verdict is faster, slower, same, lost (it had a time), coarser (of a lower precision class
    now) or new. `ratio` is new time over old. Baselines are shown but do not `count`.
    """

    problem: str
    pass_name: str
    candidate: str
    verdict: str
    ratio: Interval | None
    old_us: float | None
    new_us: float | None
    counts: bool
    note: str = ""

    @property
    def is_regression(self) -> bool:
        return self.counts and self.verdict in ("slower", "lost", "coarser")


def changes(
    old: Sequence[Record], new: Sequence[Record], *, noise: float = BETWEEN_RUNS
) -> tuple[Change, ...]:
    """Everything that has a time in either run, worst first; `noise` is what runs differ by."""
    before, after = _by_place(old), _by_place(new)
    failures = {name: f"{each.status}: {each.error}" for name, each in _named(new) if each.error}
    found = [
        _change(place, before.get(place), after.get(place), noise, counts, failures)
        for place, counts in {**_places(old), **_places(new)}.items()
    ]
    present = [each for each in found if each is not None]
    return tuple(sorted(present, key=lambda each: (not each.is_regression, -_size(each))))


def differences(old: Sequence[Record], new: Sequence[Record]) -> list[str]:
    """What else differs between the runs and may be the reason: sources, settings, machines."""
    sources = [
        {name: each.problem.source_sha256 for name, each in _named(run)} for run in (old, new)
    ]
    both = [name for name in sources[0] if name in sources[1]]
    changed = [f"the source of {name}" for name in both if sources[0][name] != sources[1][name]]
    facts = [
        next((_facts(each, each.environment) for each in run if each.environment), None)
        for run in (old, new)
    ]
    if facts[0] is None or facts[1] is None:
        return changed
    return changed + [
        f"{key}: {facts[0].get(key, 'none')} → {facts[1].get(key, 'none')}"
        for key in {**facts[0], **facts[1]}
        if facts[0].get(key) != facts[1].get(key)
    ]


def _facts(record: Record, where: Environment) -> dict[str, str]:
    asked = record.settings
    return {
        "mode": asked.mode,
        "quick": str(asked.quick),
        "device": where.device,
        "cpu": where.cpu,
        "driver": where.driver,
        **where.versions,
        **where.flags,
    }


Place = tuple[str, str, str]


def _named(records: Sequence[Record]) -> Iterator[tuple[str, Record]]:
    """By name, or by path where several folders have a problem of that name."""
    names = Counter(each.problem.name for each in records)
    for each in records:
        yield each.problem.name if names[each.problem.name] == 1 else each.problem.path, each


def _results(records: Sequence[Record]) -> Iterator[tuple[Place, Result, bool]]:
    for name, record in _named(records):
        for each in record.passes:
            for result in each.results:
                place = (name, each.name, result.candidate)
                yield place, result, result.candidate in record.subjects


def _by_place(records: Sequence[Record]) -> Mapping[Place, Result]:
    return {place: result for place, result, _ in _results(records)}


def _places(records: Sequence[Record]) -> dict[Place, bool]:
    return {place: counts for place, _, counts in _results(records)}


def _change(
    place: Place,
    old: Result | None,
    new: Result | None,
    noise: float,
    counts: bool,
    failures: Mapping[str, str],
) -> Change | None:
    before, after = (each.timing if each else None for each in (old, new))
    times = (before.median_us if before else None, after.median_us if after else None)
    if before is None and after is None:
        return None
    if before is None or after is None:
        verdict = "lost" if after is None else "new"
        why = new.note if new else failures.get(place[0], "not in the new run")
        note = why if after is None else ""
        return Change(*place, verdict, None, *times, counts, note)
    assert old is not None and new is not None
    ratio = change(before.samples_us, after.samples_us)
    if PRECISIONS.index(new.precision) > PRECISIONS.index(old.precision):
        note = f"{old.precision} → {new.precision}"
        return Change(*place, "coarser", ratio, *times, counts, note)
    verdict = "same"
    if ratio.low > 1 + noise:
        verdict = "slower"
    elif ratio.high < 1 - noise:
        verdict = "faster"
    return Change(*place, verdict, ratio, *times, counts)


def _size(each: Change) -> float:
    return each.ratio.value if each.ratio else 0.0
