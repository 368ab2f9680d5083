"""The problem's own model in processes of its own, under the protocol of a candidate's.

On a CPU they load and compile while the candidate is heard: PyTorch's compiler takes longer than
that. Each stands still while another one is timed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fusewright.judge.arena import Arena
from fusewright.judge.calls import COMPILED
from fusewright.judge.conversation import Conversation, words_of_error
from fusewright.judge.expectations import Expectations
from fusewright.judge.process import UNANSWERED, CandidateProcess, Limits
from fusewright.judge.requests import CallFacts, load_request, weights_request
from fusewright.judge.script import Step
from fusewright.judge.wire import BadMessage, Node
from fusewright.verify.scenarios import Question

EAGER = "eager"
BASELINES = (EAGER, *COMPILED)
_BASELINE_S = 600.0
_Request = tuple[Node, list[bytes]]


@dataclass(frozen=True)
class _FirstCall:
    """What a baseline is asked for once, so that it is compiled."""

    step: Step
    questions: Sequence[Question]
    facts: CallFacts
    result_bytes: int


class Baselines:
    """The processes of some baselines, which make a call of each step when they start.

    Use it as a context manager, and nothing of them is left.
    """

    def __init__(
        self,
        expectations: Expectations,
        kinds: Sequence[str],
        steps: Sequence[Step],
        *,
        confined: bool,
    ) -> None:
        self._expectations, self._confined = expectations, confined
        self._kinds, self._steps = kinds, steps
        self._open = ExitStack()
        self._threads = ThreadPoolExecutor(len(BASELINES))
        self._talks: dict[str, Conversation] = {}
        self._loaded: dict[str, Future[str]] = {}

    def __enter__(self) -> Baselines:
        return self

    def __exit__(self, *error: object) -> None:
        for talk in self._talks.values():
            talk.process.terminate()
        self._threads.shutdown()
        self._open.close()

    def start(self) -> None:
        """Start the processes, each with a thread that waits for it.

        All values are drawn here, in the caller's thread, because PyTorch has one random state.
        """
        calls = [self._first_call(each) for each in self._steps]
        problem = self._expectations.problem
        path = Path(problem.path or "").absolute()
        weights = weights_request(self._expectations.model)
        for kind in self._kinds:
            chance = random.Random(self._expectations.chance.getrandbits(62))
            talk = self._open.enter_context(self._process(chance))
            load = load_request(path, problem, kind)
            self._talks[kind] = talk
            self._loaded[kind] = self._threads.submit(_load, talk, load, weights, calls)

    def wait(self) -> None:
        """Until they stand still, or have failed."""
        for each in self._loaded.values():
            each.result()

    def ready(self) -> tuple[dict[str, Conversation], tuple[str, ...]]:
        """Those that can be timed, which have the present weights and stand still; and notes on
        the others."""
        is_early = bool(self._loaded)
        if not is_early:
            self.start()
        faults = {kind: each.result() for kind, each in self._loaded.items()}
        if is_early:
            weights = weights_request(self._expectations.model)
            for kind, talk in self._talks.items():
                faults[kind] = faults[kind] or _renew(talk, weights)
        talks = {kind: talk for kind, talk in self._talks.items() if not faults[kind]}
        return talks, tuple(f"{kind} failed: {words}" for kind, words in faults.items() if words)

    def _first_call(self, step: Step) -> _FirstCall:
        expectations = self._expectations
        questions = expectations.questions(step)
        facts = CallFacts(input_gradients=expectations.differentiable[step.mode])
        size = len(questions) * expectations.call_bytes(step.mode)
        return _FirstCall(step, questions, facts, size)

    @contextmanager
    def _process(self, chance: random.Random) -> Iterator[Conversation]:
        arena = Arena.new(*self._expectations.arena_bytes())
        limits, device = Limits(_BASELINE_S), self._expectations.device.type
        try:
            with CandidateProcess(limits, arena, confined=self._confined, device=device) as process:
                yield Conversation(process, chance)
        finally:
            arena.close()


def _load(
    talk: Conversation, load: _Request, weights: _Request, calls: Sequence[_FirstCall]
) -> str:
    def do() -> None:
        talk.process.started()
        _require(talk.ask("loading", load)[0])
        _require(talk.ask("weights", weights)[0])
        for each in calls:  # an error comes again when this pass is timed, and counts for it alone
            talk.call(each.step, each.questions, each.facts, each.result_bytes)

    return _fault_of(talk, do)


def _renew(talk: Conversation, weights: _Request) -> str:
    return _fault_of(talk, lambda: _require(talk.ask("weights", weights)[0]))


def _fault_of(talk: Conversation, do: Callable[[], None]) -> str:
    """What goes wrong, which ends the process; empty if it has done this and stands still."""
    try:
        do()
        talk.process.stop()
    except UNANSWERED as error:
        talk.process.terminate()
        return str(error) or type(error).__name__
    return ""


def _require(header: Node) -> None:
    if "error" in header:
        raise BadMessage(words_of_error(header))
