"""The problem's own model in processes of its own, under the protocol of a candidate's.

On a CPU they load and compile while the candidate is heard: a compiler of PyTorch takes longer than
that. They stand still when they are timed against others.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusewright.judge.arena import Arena
from fusewright.judge.calls import COMPILED
from fusewright.judge.conversation import Conversation
from fusewright.judge.expectations import Expectations
from fusewright.judge.process import CandidateProcess, Ended, Late, Limits, Restless
from fusewright.judge.requests import CallFacts, load_request, weights_request
from fusewright.judge.script import Step
from fusewright.judge.wire import BadMessage, Node
from fusewright.problem.load import Problem
from fusewright.verify.scenarios import Question

EAGER = "eager"
BASELINES = (EAGER, *COMPILED)
_BASELINE_S = 600.0


@dataclass(frozen=True)
class _FirstCall:
    """What a baseline is asked for once, so that it is compiled."""

    step: Step
    questions: Sequence[Question]
    facts: CallFacts
    result_bytes: int


class Baselines:
    """The processes of the baselines; use it as a context manager, and nothing of them is left."""

    def __init__(self, problem: Problem, expectations: Expectations) -> None:
        self._problem, self._expectations = problem, expectations
        self._open = ExitStack()
        self._talks: dict[str, Conversation] = {}
        self._threads: list[threading.Thread] = []
        self._faults: dict[str, str] = {}

    def __enter__(self) -> Baselines:
        return self

    def __exit__(self, *error: object) -> None:
        for talk in self._talks.values():
            talk.process.terminate()
        for each in self._threads:
            each.join()
        self._open.close()

    def start(self, kinds: Sequence[str], steps: Sequence[Step] = (), *, confined: bool) -> None:
        """Start eager and others, and let each load its model and make these calls.

        What they are asked for is drawn here, and a thread waits for each of them.
        """
        calls = [self._first_call(each) for each in steps]
        weights = weights_request(self._expectations.model)
        path = Path(self._problem.path or "").absolute()
        for kind in dict.fromkeys((EAGER, *kinds)):
            load = load_request(path, self._problem, kind)
            chance = random.Random(self._expectations.chance.getrandbits(62))
            talk = self._open.enter_context(self._process(chance, confined))
            requests = {"loading": load, "weights": weights}
            self._talks[kind] = talk
            given = (kind, talk, requests, calls)
            self._threads.append(threading.Thread(target=self._prepare, args=given, daemon=True))
            self._threads[-1].start()

    def ready(
        self, kinds: Sequence[str], *, confined: bool
    ) -> tuple[dict[str, Conversation], tuple[str, ...]]:
        """Those that can be timed, which stand still, with the weights as they are now.

        And what is wrong with the others.
        """
        if not self._threads:
            self.start(kinds, confined=confined)
        for each in self._threads:
            each.join()
        requests = {"weights": weights_request(self._expectations.model)}
        for kind, talk in self._talks.items():
            if kind not in self._faults:
                self._prepare(kind, talk, requests, ())
        talks = {kind: talk for kind, talk in self._talks.items() if kind not in self._faults}
        return talks, tuple(f"{kind} failed: {words}" for kind, words in self._faults.items())

    def _first_call(self, step: Step) -> _FirstCall:
        expectations = self._expectations
        questions = expectations.questions(step)
        facts = CallFacts(input_gradients=expectations.differentiable[step.mode])
        size = len(questions) * expectations.call_bytes(step.mode)
        return _FirstCall(step, questions, facts, size)

    @contextmanager
    def _process(self, chance: random.Random, confined: bool) -> Iterator[Conversation]:
        arena = Arena.new(*self._expectations.arena_bytes())
        how: dict[str, Any] = {
            "confined": confined,
            "device": self._expectations.device.type,
        }
        try:
            with CandidateProcess(Limits(_BASELINE_S), arena, **how) as process:
                yield Conversation(process, chance)
        finally:
            arena.close()

    def _prepare(
        self,
        kind: str,
        talk: Conversation,
        requests: Mapping[str, tuple[Node, list[bytes]]],
        calls: Sequence[_FirstCall],
    ) -> None:
        """Make some requests and calls, and stop the process; what goes wrong is noted."""
        try:
            if "loading" in requests:
                talk.process.started()
            for doing, request in requests.items():
                _require(talk.ask(doing, request)[0])
            for each in calls:
                _require(talk.call(each.step, each.questions, each.facts, each.result_bytes).header)
            talk.process.stop()
        except (Ended, Late, BadMessage, Restless) as error:
            self._faults[kind] = str(error) or type(error).__name__


def _require(header: Node) -> None:
    if "error" in header:
        raise BadMessage(str(header["error"]["words"]).splitlines()[0])
