"""Two runs side by side: what got faster or slower by more than the noise of the samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusewright.bench.record import Environment, Record, Result
from fusewright.tune.stats import Interval, change
from fusewright.verify.classes import coarseness

# Clocks and addresses differ between two processes, however narrow their intervals are.
BETWEEN_RUNS = 0.02


@dataclass(frozen=True)
class Change:
    """One candidate in one pass of one problem.

    The verdict is faster, slower, same, new, lost (it had a time) or coarser (its precision class
    got coarser). `ratio` is new time over old. Baselines are shown but do not `count`.
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
    """Everything that has a time in either run, worst first; equal runs differ by `noise`."""
    before, after = _by_pass(old), _by_pass(new)
    failures = {name: f"{each.status}: {each.error}" for name, each in _named(new) if each.error}
    subjects = {name for each in (*old, *new) for name in each.subjects}
    found = [
        _change(key, before.get(key), after.get(key), noise, key[2] in subjects, failures)
        for key in {**before, **after}
    ]
    present = [each for each in found if each is not None]
    present.sort(key=lambda e: (not e.is_regression, -e.ratio.value if e.ratio else 0.0))
    return tuple(present)


def differences(old: Sequence[Record], new: Sequence[Record]) -> list[str]:
    """Other differences that may explain the changes: sources, settings, machines."""
    sources = [
        {name: each.problem.source_sha256 for name, each in _named(run)} for run in (old, new)
    ]
    both = [name for name in sources[0] if name in sources[1]]
    changed = [f"the source of {name}" for name in both if sources[0][name] != sources[1][name]]
    before, after = (
        next((_facts(each, each.environment) for each in run if each.environment), None)
        for run in (old, new)
    )
    if before is None or after is None:
        return changed
    return changed + [
        f"{key}: {before.get(key, 'none')} → {after.get(key, 'none')}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
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


PassKey = tuple[str, str, str]


def _named(records: Sequence[Record]) -> Iterator[tuple[str, Record]]:
    """Records by name, or by path if several folders have a problem of that name."""
    names = Counter(each.problem.name for each in records)
    for each in records:
        yield each.problem.name if names[each.problem.name] == 1 else each.problem.path, each


def _by_pass(records: Sequence[Record]) -> dict[PassKey, Result]:
    return {
        (name, each.name, result.candidate): result
        for name, record in _named(records)
        for each, result in record.results
    }


def _change(
    key: PassKey,
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
        why = new.note if new else failures.get(key[0], "not in the new run")
        verdict, note = ("lost", why) if after is None else ("new", "")
        return Change(*key, verdict, None, *times, counts, note)
    assert old is not None and new is not None
    ratio = change(before.samples_us, after.samples_us)
    if coarseness(new.precision) > coarseness(old.precision):
        note = f"{old.precision} → {new.precision}"
        return Change(*key, "coarser", ratio, *times, counts, note)
    verdict = "same"
    if ratio.low > 1 + noise:
        verdict = "slower"
    elif ratio.high < 1 - noise:
        verdict = "faster"
    return Change(*key, verdict, ratio, *times, counts)
