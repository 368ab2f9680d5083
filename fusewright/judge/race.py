"""Times a candidate beside the baselines, all under the same protocol.

Each subject has a process of its own. In each round all get the same new inputs, in random order,
and all others stand still meanwhile. The clock runs here: from "go" until the results are in this
process's memory, less an empty request. Every timed result is compared with eager's of the round.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusewright.judge.baselines import EAGER
from fusewright.judge.conversation import Conversation, Reply, words_of_error
from fusewright.judge.expectations import Expectations
from fusewright.judge.findings import readable
from fusewright.judge.floor import LeastBytes, Rates
from fusewright.judge.process import UNANSWERED
from fusewright.judge.requests import CallFacts
from fusewright.judge.script import HOW, PLACES, Step
from fusewright.judge.times import CANDIDATE, PassTimes, speedups_of, times_of
from fusewright.judge.verdict import Fault
from fusewright.judge.wire import BadMessage
from fusewright.tune import neighbours
from fusewright.verify.scenarios import Question

_EMPTY = "empty"
# A request shall take so long that its own noise, some 50 µs, does not count.
_REQUEST_S, _MOST_SETS, _SETS_BYTES = 4e-3, 48, 1 << 26
_WARM_UPS, _ENOUGH_ROUNDS, _MOST_ROUNDS = 3, 7, 60
_MOST_OF_BUDGET = 2.0
_SHORTEST_S = 2e-5
# How long a host may take to notice that a GPU is idle.
_GAP_US, _GAP_SHARE, _CLOCKS_DIFFER_US = 60.0, 0.02, 50.0
# So much longer than the device's clock tells may the judge wait.
_HIDDEN_US, _HIDDEN_SHARE = 500.0, 0.5


class BaselineError(Exception):
    """Eager itself cannot be timed."""


# Compares the candidate's reply with eager's; raises if a result is wrong.
OnReply = Callable[[Step, Sequence[Question], Reply, Reply], None]


def step_of(name: str, mode: str) -> Step:
    """A plain call of a pass: forward without gradients, or a training step."""
    return Step(mode=mode, gradients=name == "train")


@dataclass(frozen=True)
class Track:
    """Everything that all passes share. `least` are the bytes that each pass must move."""

    candidate: Conversation
    baselines: Mapping[str, Conversation]
    expectations: Expectations
    flush: Callable[[], None]
    rates: Rates
    least: Mapping[str, LeastBytes]
    chance: random.Random
    budget_s: float
    check: OnReply


class Race:
    """One pass in one mode."""

    def __init__(self, track: Track, name: str, mode: str) -> None:
        self._track, self.name = track, name
        self._step = step_of(name, mode)
        self._samples: dict[str, list[float]] = {}
        self._waits: dict[str, list[float]] = {}
        self._baselines = dict(track.baselines)
        self._notes: list[str] = []
        self._number = 0

    def run(self) -> PassTimes:
        """Rounds until the budget is spent."""
        for _ in range(_WARM_UPS):
            self._round(1)
        usual = min(self._samples[EAGER]) - min(self._samples[_EMPTY])
        sets = self._affordable(usual)
        self._round(sets)
        self._samples, self._waits, rounds = {}, {}, 0
        start, budget = time.monotonic(), self._track.budget_s
        moment, used_s = neighbours.now(), self._used_s()
        while rounds < _MOST_ROUNDS:
            self._round(sets)
            rounds += 1
            taken = time.monotonic() - start
            if taken > (budget if rounds >= _ENOUGH_ROUNDS else _MOST_OF_BUDGET * budget):
                break
        others = neighbours.other_cores(moment, neighbours.now())
        ours = (self._used_s() - used_s) / (time.monotonic() - start)
        return replace(self._timed(rounds, sets), other_cores=max(others - ours, 0.0))

    def _used_s(self) -> float:
        talks = (self._track.candidate, *self._baselines.values())
        return sum(each.process.cpu_s() for each in talks)

    def _affordable(self, usual_s: float) -> int:
        """How many calls a request has, so that it is long enough and fits into the memory."""
        if self._track.expectations.device.type == "cuda":
            return 1  # the device's clock is exact
        wanted = math.ceil(_REQUEST_S / max(usual_s, _SHORTEST_S))
        room = _SETS_BYTES // max(self._track.expectations.call_bytes(self._step.mode), 1)
        return max(1, min(wanted, _MOST_SETS, room))

    def _round(self, sets: int) -> None:
        chance = self._track.chance
        place, how = chance.choice(PLACES), chance.choice(HOW)
        step = replace(self._step, sets=sets, place=place, how=how)
        questions = self._track.expectations.questions(step)
        names = [CANDIDATE, *self._baselines]
        chance.shuffle(names)
        replies = {}
        for name in names:
            if name == CANDIDATE:
                replies[name] = self._sample(name, self._track.candidate, step, questions)
            elif (found := self._baseline(name, name, step, questions)) is not None:
                replies[name] = found
        if EAGER not in replies or not self._baseline(_EMPTY, EAGER, step, questions):
            raise BaselineError(f"no times: {'; '.join(self._notes)}")
        self._track.check(step, questions, replies[CANDIDATE], replies[EAGER])

    def _baseline(
        self, name: str, who: str, step: Step, questions: Sequence[Question]
    ) -> Reply | None:
        """A baseline's reply; None if it failed, which is noted, and it is not asked again."""
        try:
            reply = self._sample(name, self._baselines[who], step, questions)
            if not reply.has_error:
                return reply
            words = words_of_error(reply.header)
        except UNANSWERED as error:
            words = str(error) or type(error).__name__
            self._baselines[who].process.terminate()
        self._notes.append(f"{who} failed: {words}")
        del self._baselines[who]
        self._samples.pop(who, None)
        return None

    def _sample(
        self, name: str, subject: Conversation, step: Step, questions: Sequence[Question]
    ) -> Reply:
        self._number += 1
        track, differentiable = self._track, self._track.expectations.differentiable[step.mode]
        facts = CallFacts(self._number, empty=name == _EMPTY, input_gradients=differentiable)
        size = len(questions) * track.expectations.call_bytes(step.mode)
        reply = subject.call(step, questions, facts, size, track.flush)
        subject.process.stop()
        self._samples.setdefault(name, []).append(seconds_of(reply))
        self._waits.setdefault(name, []).append(reply.seconds)
        return reply

    def _timed(self, rounds: int, sets: int) -> PassTimes:
        track, hidden_us = self._track, 0.0
        if track.expectations.device.type == "cuda":
            hidden_us = hidden_s(self._samples, self._waits) * 1e6
        empty_s = min(self._samples.pop(_EMPTY))
        times = tuple(
            times_of(name, [max(each - empty_s, 0.0) / sets * 1e6 for each in samples])
            for name, samples in sorted(
                self._samples.items(), key=lambda pair: pair[0] != CANDIDATE
            )
        )
        return PassTimes(
            self.name,
            self._step.mode,
            rounds,
            sets,
            empty_s * 1e6,
            track.least[self.name].floor_us(sets, track.rates),
            times,
            speedups_of(times),
            tuple(self._notes),
            hidden_us=hidden_us,
        )


def seconds_of(reply: Reply) -> float:
    """The time of a request; on a GPU it is the device's, if that is possible at all.

    What other streams do after the default one is done counts. The rest of what lies between, a
    wait of the host, is the same in an empty request.
    """
    found = reply.header.get("device") or {}
    if reply.has_error or not found:
        return reply.seconds
    with readable():
        stream_us, device_us = float(found["stream_us"]), float(found["device_us"])
    if not 0.0 <= stream_us <= device_us <= reply.seconds * 1e6 + _CLOCKS_DIFFER_US:
        raise BadMessage("the time of the device does not fit the judge's clock")
    late = device_us - stream_us > max(_GAP_US, _GAP_SHARE * stream_us)
    return (device_us if late else stream_us) * 1e-6


def hidden_s(samples: Mapping[str, Sequence[float]], waits: Mapping[str, Sequence[float]]) -> float:
    """How much longer the judge waited for the candidate than the device's clock tells.

    What it waits in an empty request does not count. Of both, the quarter that favours the
    candidate is left out, because a busy host makes some requests long.
    """
    mine, empty = sorted(waits[CANDIDATE]), sorted(waits[_EMPTY])
    told = statistics.median(samples[CANDIDATE]) - statistics.median(samples[_EMPTY])
    return mine[len(mine) // 4] - empty[3 * len(empty) // 4] - told


def fault_of_time(found: PassTimes) -> Fault | None:
    """The fault of a time that no machine can reach, or that the judge's own clock refutes."""
    mine = found.of(CANDIDATE)
    if mine is None:
        return None
    if found.hidden_us > max(_HIDDEN_US, _HIDDEN_SHARE * mine.median_us):
        return Fault(
            "dishonest",
            "the judge waits longer than the clock of the device tells: work runs before that "
            "clock starts, or the clock was changed",
            f"{found.name}: time",
            f"{mine.median_us:.2f} µs, as the device tells",
            f"{found.hidden_us:.2f} µs more",
        )
    # On a busy machine a few rounds show nothing: all may look short beside slow empty requests.
    if mine.high_us >= found.floor_us or found.rounds < _ENOUGH_ROUNDS:
        return None
    return Fault(
        "dishonest",
        "the time is below the physical floor: a call cannot even move its bytes in it",
        f"{found.name}: time",
        f"at least {found.floor_us:.2f} µs",
        f"{mine.median_us:.2f} µs",
    )
