"""A stranger's file as a respondent of `verify`: the questions of `verify`, the judge's process.

Values go out and results come back as in a judgement; the comparison takes place here.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusewright.errors import VerifyError
from fusewright.judge.arena import Arena
from fusewright.judge.conversation import Conversation, Reply
from fusewright.judge.entry import (
    Guilty,
    enter,
    fault_of_failure,
    require,
    require_unharmed,
)
from fusewright.judge.findings import (
    fault_of_error,
    faults_of_memory,
    faults_of_state,
    results_of,
)
from fusewright.judge.process import UNANSWERED, CandidateProcess, Limits
from fusewright.judge.processes import require_confinement
from fusewright.judge.requests import CallFacts, write_request
from fusewright.judge.script import Step
from fusewright.judge.state import weights_digest
from fusewright.judge.verdict import escaped
from fusewright.problem.load import Problem, candidate_path
from fusewright.verify.budget import Footprint, free_memory
from fusewright.verify.feeds import Feed
from fusewright.verify.flags import FLAGS
from fusewright.verify.scenarios import Answer, Question

# A question may have other strides than the example, and lies somewhere within the memory.
_ROOM, _SPARE_BYTES = 4, 1 << 27
_MARK = "Warning: "


class Boxed:
    """The `ModelNew` of a file, in a process that ends with this context."""

    def __init__(
        self, problem: Problem, path: Path, device: torch.device, limits: Limits, *, confined: bool
    ) -> None:
        require_confinement(confined)
        self.problem, self.path, self.device = problem, candidate_path(path), device
        self.limits, self.confined = limits, confined
        self._open = ExitStack()
        self._talk: Conversation | None = None
        self._model = nn.Module()
        self._calls = self._heard = 0

    def __enter__(self) -> Boxed:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def begin(self, model: nn.Module, footprint: Footprint) -> None:
        """Start the process and load the file, when the sizes of a call are known."""
        if self._talk is not None:
            return
        self._model = model
        sizes = (footprint.inputs + footprint.outputs, footprint.outputs + footprint.targets)
        rooms = [int(_ROOM * (each + footprint.parameters)) + _SPARE_BYTES for each in sizes]
        arena = Arena.new(*rooms)
        self._open.callback(arena.close)
        how: dict[str, Any] = {"confined": self.confined, "device": self.device.type}
        process = self._open.enter_context(CandidateProcess(self.limits, arena, **how))
        self._talk = talk = Conversation(process, random.Random())
        with self._told(talk):
            process.started()
            enter(talk, self.path, self.problem, model)

    def ask(self, question: Question, layout: str, feed: Feed) -> Answer:
        talk = self._begun()
        self._calls += 1
        scenario = question.scenario
        step = Step(scenario.name, scenario.mode, scenario.gradients, layout=layout)
        facts = CallFacts(
            self._calls, poison=True, again=scenario.again, input_gradients=feed.gradients
        )
        with self._told(talk):
            if self.device.type == "cuda":
                free_memory(self.device)  # what this process keeps, another cannot use
            reply = talk.call(step, [question], facts, _bytes_of(question, self._model))
            self._require_right(reply, scenario.label)
            (answered,) = reply.answers
            found = Answer({layout: results_of(answered)}, bool(answered.node["random"]))
        self._repeat_warnings(talk)
        return found

    def take_parameters(self, model: nn.Module) -> None:
        talk, self._model = self._begun(), model
        with self._told(talk):
            header, _ = talk.ask("new parameters", write_request(model))
            require_unharmed(header, self.path, talk, model)

    def _begun(self) -> Conversation:
        assert self._talk is not None, "begin comes first"
        return self._talk

    def _require_right(self, reply: Reply, label: str) -> None:
        flags = frozenset(each.name for each in FLAGS)
        state = reply.report.get("state", {}) if reply.report else {}
        others = frozenset(state.get("before", {})) - flags
        require(faults_of_state(reply.report, own=others))
        if reply.has_error:
            error = reply.header["error"]
            fault = fault_of_error(error, self.path.name, label)
            # From the cause, checks of large calls see whether memory ran out.
            no_memory = error["type"] == MemoryError.__name__
            cause = MemoryError() if no_memory else RuntimeError(str(error["words"]))
            raise VerifyError(f"the candidate fails in {label}: {fault.reason}") from cause
        require(faults_of_memory(reply.report, weights_digest(self._model), reply.damaged))

    @contextmanager
    def _told(self, talk: Conversation) -> Iterator[None]:
        """A fault of the candidate is a VerifyError."""
        try:
            yield
        except Guilty as guilty:
            reason = guilty.fault.reason
            named = str(self.path) in reason
            raise VerifyError(reason if named else f"{self.path}: {reason}") from guilty
        except UNANSWERED as error:
            fault = fault_of_failure(error, talk.process, talk.doing)
            raise VerifyError(f"{self.path}: {fault.word}: {fault.reason}") from error

    def _repeat_warnings(self, talk: Conversation) -> None:
        """Warn here of what the candidate warned of in its process."""
        said = escaped(bytes(talk.process.output[self._heard :]), cut=False)
        self._heard = len(talk.process.output)
        for line in said.splitlines():
            if _MARK in line:
                warnings.warn(line.split(_MARK, 1)[1], stacklevel=2)


def _bytes_of(question: Question, model: nn.Module) -> int:
    """What an answer may have, so that none of any size is read."""
    weights = sum(each.nbytes for each in model.parameters())
    given = sum(each.nbytes for each in question.tangents.values())
    buffers = sum(each.nbytes for each in question.buffers.values())
    return weights + given + buffers
