"""One interleaved run: all candidates take turns in a new random order each round.

Clock drift and disturbances then hit all alike. Rounds go on until the 95 % interval of every
median is narrow enough or the budget is spent. A candidate that fails on the way is dropped.
"""

from __future__ import annotations

import functools
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from fusewright.bench.clock import Clock, Sample, hides_work, settle
from fusewright.bench.feeds import Feed
from fusewright.bench.record import Settings, Timing
from fusewright.bench.stats import median_interval

_WINDOW = 3
_STABLE = 0.05
_MOST_WARM_UPS = 60
_WARM_UP_SHARE = 0.25
_SECOND_LOOK = 15
_ROUNDS_BETWEEN_LOOKS = 5

T = TypeVar("T")
Call = Callable[[int], object]
Tick = Callable[[str, float], None]


@dataclass(frozen=True)
class Sampled:
    """Times of the candidates that lasted, and the words of those that failed."""

    timings: Mapping[str, Timing]
    failures: Mapping[str, str]
    rounds: int
    seconds: float


def sample(
    calls: Mapping[str, Call],
    feed: Feed,
    clock: Clock,
    settings: Settings,
    tick: Tick = lambda name, share: None,
) -> Sampled:
    """Time every call on sets that `feed` renews; `tick` hears who runs and the share done."""
    order = random.Random(settings.seed)
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    failures: dict[str, str] = {}
    exposed: dict[str, bool] = {}
    start, rounds = time.perf_counter(), 0
    with _no_collections():
        for name, call in calls.items():
            tick(f"warm up {name}", 0.0)
            warm = functools.partial(_warm_up, call, feed, clock, settings, len(calls))
            exposed[name] = bool(_guarded(name, failures, warm))
        begun = time.perf_counter()
        while rounds < settings.most_rounds:
            for name in shuffled([each for each in calls if each not in failures], order):
                tick(name, (time.perf_counter() - begun) / settings.budget_s)
                take = functools.partial(_one, calls[name], feed, clock, exposed[name])
                taken = _guarded(name, failures, take)
                samples[name] += [taken] if taken else []
            rounds += 1
            alive = {name: each for name, each in samples.items() if name not in failures}
            spent = time.perf_counter() - begun > settings.budget_s
            if not alive or (spent and rounds >= _WINDOW) or _done(alive, clock, settings, rounds):
                break
    timings = {name: timing(each, clock, settings) for name, each in alive.items()}
    return Sampled(timings, failures, rounds, time.perf_counter() - start)


def timing(samples: Sequence[Sample], clock: Clock, settings: Settings) -> Timing:
    """What the samples of one candidate say."""
    times, counted = settle(samples, clock.facts)
    found = median_interval(times)
    return Timing(
        samples_us=tuple(round(each, 4) for each in times),
        median_us=found.value,
        low_us=found.low,
        high_us=found.high,
        minimum_us=min(times),
        converged=found.width < settings.target_width and len(times) >= settings.least_rounds,
        counted=counted,
    )


def shuffled(names: Sequence[str], order: random.Random) -> list[str]:
    return order.sample(names, len(names))


def _one(call: Call, feed: Feed, clock: Clock, exposed: bool) -> Sample:
    slot = feed.refresh()
    return clock.sample(lambda: call(slot), exposed=exposed)


def _warm_up(call: Call, feed: Feed, clock: Clock, settings: Settings, count: int) -> bool:
    """Call until two windows in a row agree; tells whether the candidate works out of sight.

    Clocks rise and caches of all kinds fill meanwhile.
    """
    limit = time.perf_counter() + settings.budget_s * _WARM_UP_SHARE / count
    samples: list[Sample] = []
    for _ in range(_MOST_WARM_UPS):
        samples.append(_one(call, feed, clock, True))
        times = [each.device_us for each in samples]
        if len(times) >= 2 * _WINDOW:
            last, before = times[-_WINDOW:], times[-2 * _WINDOW : -_WINDOW]
            if abs(statistics.median(last) / statistics.median(before) - 1) < _STABLE:
                break
        if time.perf_counter() > limit and len(times) >= 2:
            break
    if clock.facts.kind == "wall clock" or not hides_work(samples[-2 * _WINDOW :], clock.facts):
        return False
    # Nobody is suspected on a few samples.
    again = [_one(call, feed, clock, True) for _ in range(_SECOND_LOOK)]
    return hides_work(again, clock.facts)


def _done(
    samples: Mapping[str, Sequence[Sample]], clock: Clock, settings: Settings, rounds: int
) -> bool:
    if rounds < settings.least_rounds or rounds % _ROUNDS_BETWEEN_LOOKS:
        return False
    return all(timing(each, clock, settings).converged for each in samples.values())


def _guarded(name: str, failures: dict[str, str], run: Callable[[], T]) -> T | None:
    """A candidate is somebody's code: whatever it raises is its result, and the others go on."""
    try:
        return run()
    except Exception as error:
        failures[name] = failure_text(error)
        return None


def failure_text(error: BaseException) -> str:
    """One line: the kind of error and its first words."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


@contextmanager
def _no_collections() -> Iterator[None]:
    """Python's garbage collector would run at random within somebody's time."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
