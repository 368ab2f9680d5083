"""Judges a ModelNew that somebody else wrote.

The candidate runs in a process of its own, in a box. This process loads the problem, never the
candidate. It sends secret weights and inputs, gets results back as bytes, and compares them with
eager and float64. The first fault ends the judgement.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fusewright.errors import ConfinementError, ProblemError, VerifyError
from fusewright.judge.box import NO_BOX, TOO_MANY
from fusewright.judge.expectations import Expectations
from fusewright.judge.findings import (
    Asked,
    compare_call,
    compare_with_right_runs,
    fault_of_check,
    fault_of_error,
    faults_of_form,
    faults_of_memory,
    faults_of_state,
    has_other_strides,
    other_outputs,
    readable,
    results_of,
)
from fusewright.judge.process import CandidateProcess, Ended, Late, Limits
from fusewright.judge.processes import missing_confinement
from fusewright.judge.requests import call_request, load_request, step_request, weights_request
from fusewright.judge.script import Step, last_steps, many_more, script
from fusewright.judge.state import held_tensors
from fusewright.judge.verdict import Fault, Verdict, escaped, gravest
from fusewright.judge.wire import BadMessage, Node, bytes_of, dtype_name, named_leaves
from fusewright.problem.load import Problem, load_problem
from fusewright.verify.compare import Check, settle
from fusewright.verify.scenarios import Results

MODES = ("train", "eval")
OnProgress = Callable[[str, float], None]
_LOOKS = 3
_KEPT_BYTES = 1 << 28
_RECALLS = 0.15
_MANY_S = 3.0
# Equal outputs of so many calls show that a model does not read its input.
_ENOUGH = 8


class _Guilty(Exception):
    """Ends the judgement with a fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


def judge(
    problem: str | Path,
    model_new: str | Path,
    *,
    limits: Limits | None = None,
    confined: bool = True,
    strict: bool = False,
    modes: Sequence[str] = MODES,
    progress: OnProgress = lambda words, share: None,
) -> Verdict:
    """Judge the `ModelNew` of a file against the `Model` of a problem, on the CPU.

    ConfinementError if this machine cannot confine a process, unless `confined` is false.
    ProblemError if the problem or the model itself is at fault. `strict` makes flags failures.
    """
    start = time.monotonic()
    path = Path(model_new).expanduser().absolute()
    if not path.is_file():
        raise ProblemError(f"{path}: there is no such file")
    if confined and (missing := missing_confinement()):
        raise ConfinementError(
            f"this machine cannot confine a stranger's process ({missing}); if you trust the file, "
            "use --unconfined: limits of time and memory hold, but network and files are open"
        )
    loaded = load_problem(problem)
    limits = limits or Limits()
    with torch.random.fork_rng(devices=[]):
        expectations = Expectations(loaded, tuple(modes), secrets.randbits(62))
        process = CandidateProcess(limits, confined=confined)
        hearing = _Hearing(loaded, path, expectations, process)
        fault = hearing.held(progress)
    verdict = hearing.verdict(fault, strict=strict)
    return replace(verdict, seconds=time.monotonic() - start)


class _Hearing:
    """One candidate's answers so far."""

    def __init__(
        self, problem: Problem, path: Path, expectations: Expectations, process: CandidateProcess
    ) -> None:
        self.problem, self.path = problem, path
        self.expectations, self.process = expectations, process
        self.chance = random.Random(secrets.randbits(62))
        self.flags: dict[str, None] = {}
        self.unasked: dict[str, None] = {}
        self.calls = self.checks = self.compared = 0
        self.kept: dict[int, tuple[list[Node], list[bytes], list[Asked]]] = {}
        self.kept_bytes = 0
        self.seen: dict[bytes, str] = {}
        self.outputs: set[bytes] = set()
        self.doing = "the launcher's start"

    def held(self, progress: OnProgress) -> Fault | None:
        """Ask everything; the first fault, or None."""
        try:
            with self.process:
                self.process.started()
                self._load()
                self._ask_all(progress)
        except _Guilty as guilty:
            return guilty.fault
        except Late:
            words = f"no answer after {self.process.limits.seconds:g} s"
            return Fault("timed out", words, self.doing, "an answer", "none")
        except Ended as ended:
            return _fault_of_end(ended.code, self.doing, bytes(self.process.output))
        except BadMessage as error:
            words = f"an answer was not written by the launcher: {error}"
            return Fault("dishonest", words, self.doing, "the launcher's answer", "other bytes")
        return None

    def _ask_all(self, progress: OnProgress) -> None:
        modes = tuple(self.expectations.references)
        steps = script(self.chance, modes)
        for number, step in enumerate(steps):
            progress(step.label, number / len(steps))
            self._examine(step)
            if self.chance.random() < _RECALLS:
                self._recall(self.chance.sample(sorted(self.kept), len(self.kept) // 2))
        ends = time.monotonic() + _MANY_S
        for step in many_more(self.chance, modes):
            if time.monotonic() > ends:
                break
            self._examine(step)
        for step in last_steps(modes):
            self._examine(step)
        self._recall(list(self.kept))

    def verdict(self, fault: Fault | None, *, strict: bool) -> Verdict:
        if self.compared >= _ENOUGH and len(self.outputs) == 1:
            self.flags["degenerate task: the model's output does not depend on its input"] = None
        flags, unasked = tuple(self.flags), ", ".join(self.unasked)
        notes = (f"not asked, because the model does not allow it: {unasked}",) if unasked else ()
        if fault is None and strict and flags:
            fault = Fault("wrong", f"a flag counts as a failure here: {flags[0]}")
        if fault is None:
            words = f"right in {self.calls} calls and {self.checks} checks"
            fault = Fault("accepted", words)
        return Verdict(
            **vars(fault),
            flags=flags,
            notes=notes,
            output=escaped(bytes(self.process.output), cut=self.process.cut),
            calls=self.calls,
            checks=self.checks,
            candidate_seconds=self.process.limits.seconds - self.process.left_s,
            confined=self.process.confined,
        )

    def _ask(
        self, doing: str, request: tuple[Node, list[bytes]], expected_bytes: int = 0
    ) -> tuple[Node, list[bytes]]:
        self.doing = doing
        return self.process.ask(*request, expected_bytes)

    def _load(self) -> None:
        """Load the candidate and give it the weights."""
        request = load_request(self.path, self.problem)
        header, _ = self._ask("loading the file", request)
        self._require(faults_of_state(header, loading=True))
        if "error" in header:
            raise _Guilty(fault_of_error(header["error"], self.path.name, self.doing))
        self._require(self._other_parameters(header))
        header, _ = self._ask("new weights", weights_request(self.expectations.model))
        if "error" in header:
            raise _Guilty(fault_of_error(header["error"], self.path.name, self.doing))
        self._require(faults_of_memory(header, self.expectations.weights()))

    def _other_parameters(self, header: Node) -> Iterable[Fault]:
        """The candidate must have the model's parameters and buffers."""
        theirs = {(kind, name): form for kind, name, form in header["held"]}
        for kind, name, each in held_tensors(self.expectations.model):
            gradient = " with gradient" if each.requires_grad else ""
            mine = f"{dtype_name(each.dtype)}{list(each.shape)}{gradient}"
            found = theirs.pop((kind, name), "missing")
            if found != mine:
                words = f"{kind} {name} is {found} and {mine} in the model; both must be the same"
                yield Fault("wrong", words, "parameters and buffers", mine, found)
        for kind, name in theirs:
            words = f"the candidate has a {kind} {name}, and the model has none"
            yield Fault("wrong", words, "parameters and buffers", "none", name)

    def _require(self, faults: Iterable[Fault]) -> None:
        with readable():
            found = list(faults)
        if found:
            raise _Guilty(gravest(found))

    def _examine(self, step: Step) -> None:
        """Ask a step; if a gradient is in doubt, again with other values."""
        looks = []
        if step.copied:
            self._copy()
        if step.new_weights:
            self._new_weights()
        for _ in range(_LOOKS):
            look = self._look(step)
            if look is None:
                return
            looks.append(look)
            wrong = [check for _, _, checks in look for check in checks if not check.ok]
            if not wrong or not all(check.is_doubtful for check in wrong):
                break
        named: dict[str, list[tuple[Check, Results, Asked]]] = {}
        for look in looks:
            for index, (found, asked, checks) in enumerate(look):
                for check in checks:
                    key = f"{index} {check.name.split(', slice ')[0]} {', slice ' in check.name}"
                    named.setdefault(key, []).append((check, found, asked))
        self.checks += len(named)
        for each in named.values():
            verdict = settle([check for check, _, _ in each])
            if not verdict.ok:
                _, found, asked = next((e for e in each if e[0] is verdict), each[0])
                raise _Guilty(self._stale(found, asked) or fault_of_check(verdict, found, asked))
        for found, asked, _ in looks[-1]:
            self._remember(found, asked)

    def _look(self, step: Step) -> list[tuple[Results, Asked, list[Check]]] | None:
        """The answers to one request with their checks; None if nothing is to be compared."""
        asked = self.expectations.asked(step)
        if not asked:
            self.unasked[step.label] = None
            return None
        step, self.calls = asked[0].step, self.calls + 1
        keep = self.kept_bytes < _KEPT_BYTES
        differentiable = self.expectations.differentiable[step.mode]
        request = call_request(asked, self.calls, keep=keep, input_gradients=differentiable)
        size = sum(map(len, request[1])) + sum(map(_result_bytes, asked))
        header, blobs = self._ask(f"call {self.calls}: {step.label}", request, size)
        self._require(faults_of_state(header))
        if "error" in header:
            fault = fault_of_error(header["error"], self.path.name, self.doing)
            if not step.may_refuse:
                raise _Guilty(fault)
            self.flags[f"refuses calls with {step.name} ({fault.reason})"] = None
            return None
        self._require(faults_of_memory(header, asked[0].weights))
        answers = header.get("calls")
        if not isinstance(answers, list) or len(answers) != len(asked):
            raise BadMessage("a call is missing in the answer")
        if keep:
            self.kept[self.calls] = (answers, blobs, asked)
            self.kept_bytes += sum(map(len, blobs))
        pairs = zip(answers, asked, strict=True)
        return [self._compared(header, blobs, answer, one) for answer, one in pairs]

    def _compared(
        self, header: Node, blobs: Sequence[bytes], answer: Node, asked: Asked
    ) -> tuple[Results, Asked, list[Check]]:
        found = results_of(answer, header, blobs)
        self._require(faults_of_form(answer, asked))
        if not asked.step.name and has_other_strides(answer, asked):
            self.flags["an output has other strides than the model's"] = None
        try:
            checks = compare_call(found, asked)
            if asked.expected.truth and any(each.is_only_inexact for each in checks):
                checks = compare_with_right_runs(found, asked, self.expectations.others(asked))
        except VerifyError as error:
            raise _Guilty(other_outputs(error, asked)) from error
        return found, asked, checks

    def _copy(self) -> None:
        """Go on with a deep copy, if the module has one."""
        header, _ = self._ask("a deep copy", ({"do": "copy"}, []))
        self._require(faults_of_state(header))
        if "error" in header:
            fault = fault_of_error(header["error"], self.path.name, self.doing)
            self.flags[f"cannot be copied ({fault.reason})"] = None
            return
        self._require(faults_of_memory(header, self.expectations.weights()))

    def _new_weights(self) -> None:
        gradients = self.expectations.new_weights()
        header, _ = self._ask("an optimizer step", step_request(gradients))
        if "error" in header:
            raise _Guilty(fault_of_error(header["error"], self.path.name, self.doing))
        self._require(faults_of_memory(header, self.expectations.weights()))

    def _remember(self, found: Results, asked: Asked) -> None:
        """Every output, to recognise it if it comes again."""
        self.compared += 1
        for name, each in found.items():
            if name.startswith("output") and isinstance(each, Tensor) and each.numel() > 1:
                self.seen.setdefault(_key(each), f"call {self.calls}, {asked.step.label}")
        for name, each in asked.expected.eager[asked.step.layout].items():
            if name.startswith("output") and isinstance(each, Tensor):
                self.outputs.add(_key(each))

    def _stale(self, found: Results, asked: Asked) -> Fault | None:
        """The fault of a wrong output that was the right one of an earlier call."""
        for name, each in found.items():
            if name.startswith("output") and isinstance(each, Tensor) and _key(each) in self.seen:
                words = f"{name} is the result of an earlier call: it was not computed again"
                return Fault(
                    "dishonest", words, asked.step.label, "a new result", self.seen[_key(each)]
                )
        return None

    def _recall(self, numbers: Sequence[int]) -> None:
        """Results of earlier calls must be as they were."""
        if not numbers:
            return
        request: Node = {"do": "recall", "ids": list(numbers)}
        header, blobs = self._ask("earlier results", (request, []), self.kept_bytes)
        if "error" in header:
            raise _Guilty(fault_of_error(header["error"], self.path.name, self.doing))
        for number in numbers:
            answers, old, asked = self.kept.pop(number)
            self.kept_bytes -= sum(map(len, old))
            with readable():
                pairs = list(zip(answers, header["found"][str(number)], asked, strict=True))
            for before, now, one in pairs:
                self._require(_changed(before, old, now, blobs, one))


def _result_bytes(asked: Asked) -> int:
    results = asked.expected.eager[asked.step.layout].values()
    return sum(each.nbytes for each in results if isinstance(each, Tensor))


def _key(tensor: Tensor) -> bytes:
    return hashlib.blake2b(bytes_of(tensor), digest_size=16).digest()


def _changed(
    before: Node, old: Sequence[bytes], now: Node, new: Sequence[bytes], asked: Asked
) -> Iterable[Fault]:
    """Faults of results that are not what they were."""
    eager = dict(named_leaves("output", asked.eager_outputs))
    nodes = dict(named_leaves("output", before["outputs"]))
    later = dict(named_leaves("output", now["outputs"]))
    free = {name: node for name, node in nodes.items() if not eager[name].get("shares")}
    gradients = before.get("gradients", {})
    free |= {f"grad {name}": node for name, node in gradients.items() if node is not None}
    later |= {f"grad {name}": node for name, node in now.get("gradients", {}).items()}
    for name, node in free.items():
        if "tensor" in node and old[node["tensor"]] != new[later[name]["tensor"]]:
            yield Fault(
                "dishonest",
                f"{name} of an earlier call has changed since: its memory is used again, or it was "
                "written after forward had returned; return new memory, and finish the work first",
                f"earlier results, {asked.step.label}",
                "the bytes of before",
                "other bytes",
            )


def _fault_of_end(code: int, doing: str, output: bytes) -> Fault:
    """A process that ended before it had answered everything."""
    if code == NO_BOX:
        words = output.decode(errors="replace").strip()
        raise ConfinementError(f"the candidate's process cannot be started: {words}")
    if code == 0:
        words = "the candidate ended its process with exit code 0 before it had answered"
        return Fault("dishonest", words, doing, "an answer", "exit code 0")
    if code == TOO_MANY:
        words = "the candidate started far too many processes"
        return Fault("unsafe", words, doing, "few processes", "hundreds")
    name = f"exit code {code}"
    if code > 128:
        with suppress(ValueError):
            name = signal.Signals(code - 128).name
    return Fault("crashed", f"the process ended with {name}", doing, "an answer", name)
