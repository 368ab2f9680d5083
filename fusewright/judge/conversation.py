"""Calls of a model in another process: prepare, go, report.

The same requests go to a candidate and to the baselines, and the same clock counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusewright.judge.findings import Answered, readable
from fusewright.judge.placement import Placement
from fusewright.judge.process import CandidateProcess
from fusewright.judge.requests import GRADIENT, CallFacts, call_request
from fusewright.judge.script import Step
from fusewright.judge.wire import BadMessage, Node
from fusewright.verify.scenarios import Question


@dataclass(frozen=True)
class Reply:
    """What came back: the answer to each call, or the header of an error.

    `report` tells what else happened, and `damaged` which inputs lost their guard zones. `seconds`
    went by from the start until the results were in the judge's memory. `peak_bytes` is the memory
    that a weighed call took, and `held_bytes` what was held before it.
    """

    header: Node
    report: Node
    answers: Sequence[Answered]
    damaged: Sequence[str]
    seconds: float
    peak_bytes: int | None = None
    held_bytes: int | None = None

    @property
    def has_error(self) -> bool:
        return "error" in self.header


def words_of_error(header: Node) -> str:
    """The first line of an error's words, or its class if it has none."""
    lines = str(header["error"]["words"]).splitlines()
    return lines[0] if lines else str(header["error"]["type"])


class Conversation:
    """One process, and the memory of its inputs."""

    def __init__(self, process: CandidateProcess, chance: random.Random) -> None:
        self.process = process
        self._placement = Placement(process.arena, chance)
        self.doing = "the launcher's start"

    def ask(
        self, doing: str, request: tuple[Node, list[bytes]], expected_bytes: int = 0
    ) -> tuple[Node, list[bytes]]:
        """The answer to a request that is no call."""
        self.doing = doing
        return self.process.ask(*request, expected_bytes)

    def call(
        self,
        step: Step,
        questions: Sequence[Question],
        facts: CallFacts,
        expected_bytes: int,
        before: Callable[[], None] = lambda: None,
    ) -> Reply:
        """Make the calls of a step; `before` runs when the inputs are written."""
        self.doing = f"call {facts.number}: {step.label}"
        header, blobs, pieces = call_request(step, questions, facts)
        self._placement.assign(pieces, step.place)
        ready, _ = self.process.ask(header, blobs, 0)
        if "error" in ready:
            return Reply(ready, ready, (), (), 0.0)

        def write() -> None:
            self._placement.write()
            before()

        gone = self.process.go(write, expected_bytes, weigh=facts.weigh)
        done, seconds = gone.header, gone.seconds
        if "error" in done:
            return Reply(done, done, (), (), seconds)
        nodes = done.get("calls")
        if not isinstance(nodes, list) or len(nodes) != len(questions):
            raise BadMessage("a call is missing in the answer")
        with readable():
            if not all(isinstance(each["outputs"], dict) for each in nodes):
                raise BadMessage("a call has no outputs in the answer")
        report, more = self.process.ask({"do": "report"}, [], expected_bytes)
        if "error" in report:
            return Reply(report, report, (), (), seconds)
        with readable():
            answers = [
                self._answered(number, node, gone.results, report, more)
                for number, node in enumerate(nodes)
            ]
            told = done.get("device") or {}
            memory = (
                told.get("peak_bytes", gone.peak_bytes),
                told.get("held_bytes", gone.held_bytes),
            )
            peak, held = (None if each is None else int(each) for each in memory)
        return Reply(done, report, answers, self._placement.damaged(), seconds, peak, held)

    def _answered(
        self, number: int, node: Node, blobs: list[bytes], report: Node, more: list[bytes]
    ) -> Answered:
        changed = dict(self._placement.changed(number))
        inputs = {name: each for name, each in changed.items() if not name.startswith(GRADIENT)}
        shares = report["shares"][number]
        spoiled = len(inputs) < len(changed)
        return Answered(node, blobs, report, more, shares, inputs, spoiled, self.process.device)
