"""How a candidate enters: its process loads the file and is given the model's values.

`Guilty` ends a judgement with a fault, and `fault_of_failure` says what a process did that gave no
answer. `judge` and `verify` both begin here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn

from fusewright.judge.conversation import Conversation
from fusewright.judge.findings import (
    fault_of_end,
    fault_of_error,
    faults_of_memory,
    faults_of_state,
    readable,
)
from fusewright.judge.process import CandidateProcess, Ended, Late, Restless
from fusewright.judge.requests import load_request, weights_request
from fusewright.judge.state import form_of, held_tensors, saved_forms, weights_digest
from fusewright.judge.verdict import Fault, gravest
from fusewright.judge.wire import BadMessage, Node
from fusewright.problem.load import Problem


class Guilty(Exception):
    """Ends the judgement with a fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


def require(faults: Iterable[Fault]) -> None:
    """Raise the gravest of these faults, if there is one."""
    with readable():
        found = list(faults)
    if found:
        raise Guilty(gravest(found))


def enter(
    talk: Conversation,
    path: Path,
    problem: Problem,
    model: nn.Module,
    own_changes: frozenset[str] = frozenset(),
) -> None:
    """Load the candidate and give it the model's values; Guilty if it does not fit."""
    header, _ = talk.ask("loading the file", load_request(path, problem, "candidate"))
    require(faults_of_state(header, loading=True, own=own_changes))
    if "error" in header:
        raise Guilty(fault_of_error(header["error"], path.name, talk.doing))
    require(_other_parameters(header, model))
    require(_other_state(header, model))
    header, _ = talk.ask("new weights", weights_request(model))
    require_unharmed(header, path, talk, model)


def require_unharmed(header: Node, path: Path, talk: Conversation, model: nn.Module) -> None:
    """After a request that is no call: no error, and the candidate has the model's parameters."""
    if "error" in header:
        raise Guilty(fault_of_error(header["error"], path.name, talk.doing))
    require(faults_of_memory(header, weights_digest(model)))


def _other_parameters(header: Node, model: nn.Module) -> Iterator[Fault]:
    """The candidate must have the model's parameters and buffers."""
    theirs = {(kind, name): form for kind, name, form in header["held"]}
    for kind, name, each in held_tensors(model):
        mine = form_of(each)
        found = theirs.pop((kind, name), "missing")
        if found != mine:
            words = f"{kind} {name} is {found} and {mine} in the model; both must be the same"
            yield Fault("wrong", words, "parameters and buffers", mine, found)
    for kind, name in theirs:
        words = f"the candidate has a {kind} {name}, and the model has none"
        yield Fault("wrong", words, "parameters and buffers", "none", name)


def _other_state(header: Node, model: nn.Module) -> Iterator[Fault]:
    """The candidate must save and load the files of weights that the model does."""
    mine, theirs = saved_forms(model), header["saved"]
    for name in sorted({*mine, *theirs}):
        expected, seen = (each.get(name, "missing") for each in (mine, theirs))
        if expected != seen:
            words = (
                f"state_dict has {name} as {seen}, and as {expected} in the model: neither can "
                "load the other's files of weights"
            )
            yield Fault("wrong", words, "state_dict", expected, str(seen))


def fault_of_failure(
    error: Late | Ended | BadMessage | Restless, process: CandidateProcess, doing: str
) -> Fault:
    """A process that gave no answer, or one that is not the launcher's."""
    match error:
        case Late():
            words = f"no answer after {process.limits.seconds:g} s"
            return Fault("timed out", words, doing, "an answer", "none")
        case Restless():
            words = "its processes run while they must stand still: a timer or a signal wakes them"
            return Fault("dishonest", words, doing, "stopped processes", "running ones")
        case Ended():
            return fault_of_end(error.code, doing, bytes(process.output))
        case BadMessage():
            words = f"an answer was not written by the launcher: {error}"
            return Fault("dishonest", words, doing, "the launcher's answer", "other bytes")
