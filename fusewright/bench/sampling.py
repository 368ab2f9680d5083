"""One interleaved run: all candidates take turns, in a new random order each round.

So clock drift and disturbances affect all of them equally. Rounds continue until the 95 % interval
of every median is narrow enough or the budget is spent. A candidate that fails is dropped. If one
works on another stream, the rounds are repeated, and it is timed from an idle device. If it does so
only sometimes, it gets no time.
"""

from __future__ import annotations

import functools
import gc
import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from fusewright.bench.clock import Clock, Look, Sample, hides_work, settle
from fusewright.bench.record import Settings, Timing
from fusewright.tune.stats import FEWEST, median_interval
from fusewright.verify.feeds import Feed

_SMOOTHED = 3  # calls to a median
_STABLE = 0.05
_MOST_WARM_UPS = 60
_WARM_UP_SHARE = 0.25
_FEW_LOOKS, _MANY_LOOKS = 7, 15
_LOOK_CHANCE = 0.125
_MOST_RUNS = 2
_ROUNDS_BETWEEN_MEDIANS = 5

T = TypeVar("T")
TimedCall = Callable[[int], object]
Tick = Callable[[str, float], None]
Between = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Sampled:
    """Times of the candidates that stayed in the run, and the errors of those that failed."""

    timings: Mapping[str, Timing]
    failures: Mapping[str, str]
    rounds: int
    seconds: float
    busy_us: float


@dataclass(frozen=True)
class Taken:
    """Samples and looks of the candidates that stayed in the run, by name."""

    samples: Mapping[str, Sequence[Sample]]
    looks: Mapping[str, Sequence[Look]]
    rounds: int

    @property
    def hidden(self) -> set[str]:
        """The candidates that work on another stream."""
        return {name for name, each in self.looks.items() if each and hides_work(each)}


def sample(
    calls: Mapping[str, TimedCall],
    feed: Feed,
    clock: Clock,
    settings: Settings,
    tick: Tick = lambda name, share: None,
    between: Between = lambda names: None,
) -> Sampled:
    """Time every call on sets that `feed` renews. `tick` gets the name and the share done.

    `between` is called once, after an unpredictable round, with the candidates still in the run.
    """
    start = time.perf_counter()
    run = _Run(calls, feed, clock, settings, tick, random.Random(settings.seed))
    with _no_collections():
        exposed = run.warm_up()
        for _ in range(_MOST_RUNS):
            taken = run.rounds(exposed, between)
            found = taken.hidden - exposed
            if not found:
                break
            # It used no other stream during the warm-up, so its times may hide work.
            exposed |= found
        looks = dict(taken.looks)
        for name in found:
            looks[name] = run.looks(name, _MANY_LOOKS)  # a few looks prove nothing
            if looks[name] and hides_work(looks[name]):
                run.failures[name] = "it works on other streams only sometimes, so it gets no time"
    timings = {
        name: timing(each, looks[name], clock, settings)
        for name, each in taken.samples.items()
        if name not in run.failures
    }
    seconds = time.perf_counter() - start
    return Sampled(timings, run.failures, taken.rounds, seconds, run.busy_us)


def timing(
    samples: Sequence[Sample], looks: Sequence[Look], clock: Clock, settings: Settings
) -> Timing:
    """The median of one candidate's samples, and its interval."""
    times, counted = settle(samples, looks, clock.facts)
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


@dataclass
class _Run:
    """The candidates of one run; `failures` grows during the run."""

    calls: Mapping[str, TimedCall]
    feed: Feed
    clock: Clock
    settings: Settings
    tick: Tick
    order: random.Random
    failures: dict[str, str] = field(default_factory=dict)
    busy_us: float = 0.0

    @property
    def alive(self) -> list[str]:
        return [name for name in self.calls if name not in self.failures]

    def warm_up(self) -> set[str]:
        """Call each candidate until its time is stable; returns those that use another stream."""
        exposed, longest = set(), 0.0
        for name in self.calls:
            self.tick(f"warm up {name}", 0.0)
            for call_us in self._guarded(name, functools.partial(self._until_stable, name)):
                longest = max(longest, call_us)
            # A suspicion from a few looks must be confirmed by many.
            found = (self.looks(name, count) for count in (_FEW_LOOKS, _MANY_LOOKS))
            if all(looks and hides_work(looks) for looks in found):
                exposed.add(name)
        self.busy_us = self.clock.keep_busy(longest)
        return exposed

    def _until_stable(self, name: str) -> float:
        """Call until two medians in a row agree: clocks rise and caches fill in the meantime.

        Returns how long the last calls took to return.
        """
        share = self.settings.budget_s * _WARM_UP_SHARE / len(self.calls)
        limit = time.perf_counter() + share
        seen: list[Sample] = []
        for _ in range(_MOST_WARM_UPS):
            seen.append(self._sample(name, exposed=True))
            times = [each.device_us for each in seen]
            if len(times) >= 2 * _SMOOTHED:
                last, before = times[-_SMOOTHED:], times[-2 * _SMOOTHED : -_SMOOTHED]
                if abs(statistics.median(last) / statistics.median(before) - 1) < _STABLE:
                    break
            if time.perf_counter() > limit and len(times) >= 2:
                break
        return statistics.median(each.call_us for each in seen[-_SMOOTHED:])

    def rounds(self, exposed: set[str], between: Between) -> Taken:
        """Run rounds until every median is known or the budget is spent; some rounds also look."""
        samples: dict[str, list[Sample]] = {name: [] for name in self.alive}
        looks: dict[str, list[Look]] = {name: [] for name in self.alive}
        begun, rounds = time.perf_counter(), 0
        spot = 1 + secrets.randbelow(self.settings.least_rounds)
        over = rounds >= self.settings.most_rounds
        while self.alive and not over:
            looking = self.order.random() < _LOOK_CHANCE
            for name in self.order.sample(self.alive, len(self.alive)):
                self.tick(name, (time.perf_counter() - begun) / self.settings.budget_s)
                take = functools.partial(self._sample, name, exposed=name in exposed)
                samples[name] += self._guarded(name, take)
                looks[name] += self.looks(name, int(looking))
            rounds += 1
            spent = time.perf_counter() - begun > self.settings.budget_s
            over = (spent and rounds >= FEWEST) or rounds >= self.settings.most_rounds
            over = over or self._is_known(samples, exposed, rounds)
            if rounds == spot or (over and rounds < spot):
                paused = time.perf_counter()
                between(self.alive)
                begun += time.perf_counter() - paused
        for name in self.alive:
            looks[name] += self.looks(name, _FEW_LOOKS - len(looks[name]))
        kept = self.alive
        return Taken({n: samples[n] for n in kept}, {n: looks[n] for n in kept}, rounds)

    def _is_known(
        self, samples: Mapping[str, Sequence[Sample]], exposed: set[str], rounds: int
    ) -> bool:
        if rounds < self.settings.least_rounds or rounds % _ROUNDS_BETWEEN_MEDIANS:
            return False
        widths = (
            median_interval([s.device_us if name in exposed else s.stream_us for s in each]).width
            for name, each in samples.items()
            if name not in self.failures
        )
        return all(width < self.settings.target_width for width in widths)

    def _sample(self, name: str, *, exposed: bool) -> Sample:
        slot = self.feed.refresh()
        return self.clock.sample(lambda: self.calls[name](slot), exposed=exposed)

    def looks(self, name: str, count: int) -> list[Look]:
        """No looks with a wall clock: it measures all work."""
        if self.clock.facts.kind == "wall clock":
            return []

        def look() -> Look:
            slot = self.feed.refresh()
            return self.clock.look(lambda: self.calls[name](slot))

        return [each for _ in range(count) for each in self._guarded(name, look)]

    def _guarded(self, name: str, run: Callable[[], T]) -> list[T]:
        """Run the candidate's code; an exception becomes its result, and the others continue."""
        if name in self.failures:
            return []
        try:
            return [run()]
        except Exception as error:
            self.failures[name] = failure_text(error)
            return []


def failure_text(error: BaseException) -> str:
    """One line: the kind of error and the first line of its message."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disable Python's garbage collector: it would run within random samples."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
