"""One candidate's hearing: every request, its answer, and the first fault.

The candidate runs in a process of its own. This one sends secret weights and inputs, gets results
back as bytes, and compares them with eager and float64.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from fusewright.errors import VerifyError
from fusewright.judge.baselines import Baselines
from fusewright.judge.classes import Classes
from fusewright.judge.conversation import Conversation, Reply
from fusewright.judge.entry import Guilty, enter, fault_of_failure, require
from fusewright.judge.expectations import Expectations
from fusewright.judge.findings import (
    Answered,
    Asked,
    asked_beside,
    compare_call,
    compare_with_right_runs,
    fault_of_check,
    fault_of_error,
    faults_of_changes,
    faults_of_forgiven,
    faults_of_form,
    faults_of_memory,
    faults_of_state,
    has_other_strides,
    other_outputs,
    readable,
    results_of,
)
from fusewright.judge.memory import OwnPeak, is_kept, is_too_much
from fusewright.judge.operators import replaces_nothing
from fusewright.judge.process import UNANSWERED, CandidateProcess
from fusewright.judge.requests import CallFacts
from fusewright.judge.script import Step, last_steps, leak_steps, many_more, script
from fusewright.judge.state import values_digest
from fusewright.judge.timekeeper import Timed, Timing, baselines_of, time_candidate
from fusewright.judge.times import gain_in_words
from fusewright.judge.tripwires import tripwires
from fusewright.judge.upkeep import go_on_with_copy, take_new_weights
from fusewright.judge.verdict import Fault, Verdict, escaped, one_line
from fusewright.judge.wire import Node
from fusewright.problem.load import Problem
from fusewright.verify.compare import Check, settle
from fusewright.verify.scenarios import Question, Results, Usual

OnProgress = Callable[[str, float], None]
_LOOKS = 3
_KEPT_BYTES = 1 << 28
_RECALLS, _TRAINED = 0.15, 0.3
_POISONED, _BUSY = 0.7, 0.5
_MANY_S = 3.0
# Equal outputs of so many calls show that a model does not read its input.
_ENOUGH = 8
_MIB = 1 << 20
# The number of the second call: the first ones have and have no gradients.
_FIRST = 1
_FALLBACK = "runs all of the model's own PyTorch operators: no kernel replaces any of them"


class Hearing:
    """One candidate's answers so far."""

    def __init__(
        self,
        problem: Problem,
        path: Path,
        expectations: Expectations,
        process: CandidateProcess,
        own_peak: OwnPeak,
    ) -> None:
        self.problem, self.path = problem, path
        self.expectations, self.process = expectations, process
        self.own_peak = own_peak
        self.chance = random.Random(secrets.randbits(62))
        self.flags: dict[str, None] = {}
        self.unasked: dict[str, None] = {}
        self.calls = self.checks = self.compared = self.graded = 0
        self.forgiven: list[str] = []
        self.kept: dict[int, tuple[list[Node], Sequence[bytes], list[Asked]]] = {}
        self.kept_bytes = 0
        self.seen: dict[str, str] = {}
        self.outputs: set[str] = set()
        self.talk = Conversation(process, self.chance)
        self._whose = (path, expectations)
        self.usual: dict[str, Usual] = {}
        self.doubtful: dict[str, list[tuple[Check, Results, Asked]]] = {}
        self.timed: Timed | None = None
        self.unweighed = False
        self.held_bytes: int | None = None
        self.peaks: dict[str, int] = {}
        self.classes = Classes()
        self.build_s: float | None = None

    def held(self, progress: OnProgress, timing: Timing | None = None) -> Fault | None:
        """Ask everything, then take times; the first fault, or None."""
        try:
            with self.process, baselines_of(timing, self.expectations, self.process) as others:
                self.process.started()
                own = self.expectations.own_changes
                enter(self.talk, self.path, self.problem, self.expectations.model, own)
                self._ask_all(others, progress)
                if timing is not None:
                    self._time(timing, others, progress)
        except Guilty as guilty:
            return guilty.fault
        except UNANSWERED as error:
            return fault_of_failure(error, self.process, self.talk.doing)
        return None

    def _ask_all(self, baselines: Baselines, progress: OnProgress) -> None:
        modes = tuple(self.expectations.references)
        steps = list(filter(self.expectations.applies, script(self.chance, modes)))
        for number, step in enumerate(steps):
            progress(step.label, number / len(steps))
            self._examine(step)
            if number == _FIRST:
                self.build_s = self.process.limits.seconds - self.process.left_s
                if self.process.device == "cpu":
                    baselines.start()
            if self.chance.random() < _RECALLS:
                self._recall(self.chance.sample(sorted(self.kept), len(self.kept) // 2))
        ends = time.monotonic() + _MANY_S
        for step in many_more(self.chance, modes):
            if time.monotonic() > ends:
                break
            self._examine(step)
        baselines.wait()  # this process's own memory is measured, too
        for step in filter(self.expectations.applies, last_steps(modes)):
            self._examine(step)
        self._recall(list(self.kept))
        self._look_for_leaks(modes)
        require(faults_of_forgiven(self.forgiven, self.graded))

    def verdict(self, fault: Fault | None, *, strict: bool) -> Verdict:
        if self.compared >= _ENOUGH and len(self.outputs) == 1:
            self.flags["degenerate task: the model's output does not depend on its input"] = None
        self.flags |= dict.fromkeys(tripwires(self.path))
        flags, unasked = tuple(self.flags), ", ".join(self.unasked)
        notes: tuple[str, ...] = (
            (f"not asked, because the model does not allow it: {unasked}",) if unasked else ()
        )
        notes += ("the kernel does not tell the memory of a call",) if self.unweighed else ()
        notes += self.timed.notes if self.timed else ()
        if fault is None and strict and flags:
            fault = Fault("wrong", f"a flag counts as a failure here: {flags[0]}")
        if fault is None:
            words = f"right in {self.calls} calls and {self.checks} checks"
            words += gain_in_words(self.timed.times) if self.timed else ""
            fault = Fault("accepted", words)
        return Verdict(
            **vars(fault.in_lines()),
            flags=tuple(map(one_line, flags)),
            notes=notes,
            output=escaped(bytes(self.process.output), cut=self.process.cut),
            calls=self.calls,
            checks=self.checks,
            candidate_seconds=self.process.limits.seconds - self.process.left_s,
            confined=self.process.confined,
            build_seconds=self.build_s,
            precisions=self.classes.by_pass(),
            peak_bytes=self.peaks,
            times=self.timed.times if self.timed else (),
            conditions=self.timed.conditions if self.timed else None,
        )

    def _require_state(self, header: Node) -> None:
        require(faults_of_state(header, own=self.expectations.own_changes))

    def _examine(self, step: Step) -> None:
        """Ask a step; if a gradient is in doubt, again with other values."""
        looks = []
        if step.copied:
            self.flags |= dict.fromkeys(go_on_with_copy(self.talk, step.copied, *self._whose))
        if step.new_weights:
            take_new_weights(self.talk, *self._whose, loaded=step.loaded)
        elif self.chance.random() < _TRAINED:
            self.expectations.train_once()
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
            if not verdict.ok and step.lenient:
                self.flags[step.lenient] = None
            elif not verdict.ok:
                _, found, asked = next((e for e in each if e[0] is verdict), each[0])
                raise Guilty(self._stale(found, asked) or fault_of_check(verdict, found, asked))
            elif verdict.forgiven and not step.lenient:
                self.forgiven.append(f"{step.label}: {verdict.name}")
        self.graded += bool(looks[0][0][1].step.gradients)
        for found, asked, checks in looks[-1]:
            self._remember(found, asked)
            if not step.name:
                self._learn(checks)

    def _look(self, step: Step) -> list[tuple[Results, Asked, list[Check]]] | None:
        """The answers to one request with their checks; None if nothing is to be compared."""
        asked = self.expectations.asked(step)
        if not asked:
            self.unasked[step.label] = None
            return None
        step, self.calls = asked[0].step, self.calls + 1
        keep = self.kept_bytes < _KEPT_BYTES and not step.lenient
        reply = self._called(step, asked, keep=keep)
        if reply is None:
            return None
        if keep:
            nodes, blobs = [each.node for each in reply.answers], reply.answers[0].blobs
            self.kept[self.calls] = (nodes, blobs, asked)
            self.kept_bytes += sum(map(len, blobs))
        try:
            pairs = zip(reply.answers, asked, strict=True)
            return [self._compared(answer, one) for answer, one in pairs]
        except Guilty:
            if not step.lenient:
                raise
            self.flags[step.lenient] = None
            return None

    def _called(self, step: Step, asked: list[Asked], *, keep: bool) -> Reply | None:
        """The answers to a step; None if the candidate refuses it, which is noted."""
        facts = CallFacts(
            self.calls,
            keep=keep,
            poison=self.chance.random() < _POISONED and not step.weighed,
            busy=step.aside or self.chance.random() < _BUSY,
            trace=step.traced,
            weigh=step.weighed,
            input_gradients=self.expectations.differentiable[step.mode],
            detached=asked[0].detached,
        )
        size = sum(each.result_bytes for each in asked)
        questions = [each.expected.question for each in asked]
        reply = self.talk.call(step, questions, facts, size)
        if reply.has_error and step.may_refuse:
            self._require_state(reply.report)
            fault = fault_of_error(reply.header["error"], self.path.name, self.talk.doing)
            self.flags[f"refuses calls with {step.name} ({fault.reason})"] = None
            return None
        self._require_clean(reply, asked[0].weights)
        if step.traced:
            with readable():
                mine = {str(name): int(count) for name, count in reply.header["operators"].items()}
            if replaces_nothing(mine, self.expectations.operators(step, asked)):
                self.flags[_FALLBACK] = None
        if step.weighed:
            self._weigh(step, asked[0], reply.peak_bytes)
            self.held_bytes = reply.held_bytes
        return reply

    def _look_for_leaks(self, modes: Sequence[str]) -> None:
        """A flag if calls leave memory behind; what they took before is known by now."""
        if self.process.device != "cpu":  # CUDA's driver takes 64 MiB of the host (H200)
            return
        before, self.kept_bytes = self.held_bytes, _KEPT_BYTES  # the judge keeps nothing any more
        steps = leak_steps(modes)
        for step in steps:
            self._examine(step)
        if before is None or self.held_bytes is None:
            return
        grown, each = self.held_bytes - before, self.expectations.call_bytes(steps[0].mode)
        if is_kept(grown, len(steps), each):
            words = f"{grown / _MIB:.0f} MiB more after {len(steps)} calls"
            self.flags[f"keeps memory between calls: {words}"] = None

    def _weigh(self, step: Step, asked: Asked, mine: int | None) -> None:
        """A flag if the call took far more memory than eager's."""
        eager = self.expectations.peak_bytes(step, asked, self.own_peak)
        if mine is not None:
            self.peaks["train" if step.gradients else "forward"] = mine
        if mine is None or eager is None:
            self.unweighed = True
        elif is_too_much(mine, eager, self.process.device):
            much, little = (f"{each / _MIB:.0f} MiB" for each in (mine, eager))
            words = f"{step.label} takes {much} of memory at its peak, and eager takes {little}"
            self.flags[f"needs much memory: {words}"] = None

    def _require_clean(self, reply: Reply, weights: str) -> None:
        """An answer, and nothing changed for others."""
        self._require_state(reply.report)
        if reply.has_error:
            raise Guilty(fault_of_error(reply.header["error"], self.path.name, self.talk.doing))
        require(faults_of_memory(reply.report, weights, reply.damaged))

    def _compared(self, answer: Answered, asked: Asked) -> tuple[Results, Asked, list[Check]]:
        found = results_of(answer)
        require(faults_of_form(answer, asked))
        if not asked.step.name and has_other_strides(answer, asked):
            self.flags["an output has other strides than the model's"] = None
        try:
            checks = compare_call(found, asked)
            if asked.expected.truth and any(each.is_only_inexact for each in checks):
                checks = compare_with_right_runs(found, asked, self.expectations.others(asked))
        except VerifyError as error:
            raise Guilty(other_outputs(error, asked)) from error
        return found, asked, checks

    def _learn(self, checks: Sequence[Check]) -> None:
        """How far the candidate and eager are usually apart, for calls without a float64 run."""
        self.classes.note(checks)
        for each in checks:
            if each.float64 and each.ok and ", slice " not in each.name:
                old = self.usual.get(each.name, each.usual)
                error, largest = (
                    max(old.error, each.usual.error),
                    max(old.largest, each.usual.largest, each.largest),
                )
                self.usual[each.name] = Usual(error, largest, old.noise or each.noise)

    def _time(self, timing: Timing, baselines: Baselines, progress: OnProgress) -> None:
        facts = (timing, self.talk, baselines, self.expectations)
        self.timed = time_candidate(*facts, self._check_timed, progress)
        for name, each in self.doubtful.items():
            verdict = settle([check for check, _, _ in each])
            wrong = [name for check, _, _ in each if not check.ok]
            require(faults_of_forgiven(wrong if verdict.forgiven else [], len(each)))
            if not verdict.ok:
                _, found, asked = each[0]
                raise Guilty(fault_of_check(verdict, found, asked))
        if self.timed.fault is not None:
            raise Guilty(self.timed.fault)

    def _check_timed(
        self, step: Step, questions: Sequence[Question], mine: Reply, eager: Reply
    ) -> None:
        """Compare a timed call of the candidate with eager's, whose process is not its own."""
        self.calls += 1
        weights = self.expectations.weights()
        self._require_clean(mine, weights)
        for question, answer, other in zip(questions, mine.answers, eager.answers, strict=True):
            asked = asked_beside(step, question, other, self.usual, weights)
            found, _, checks = self._compared(answer, asked)
            self.checks += len(checks)
            for check in checks:
                if check.is_doubtful or check.name in self.doubtful:
                    self.doubtful.setdefault(check.name, []).append((check, found, asked))
                elif not check.ok:
                    raise Guilty(self._stale(found, asked) or fault_of_check(check, found, asked))
            self._remember(found, asked)

    def _remember(self, found: Results, asked: Asked) -> None:
        """Every output, to recognise it if it comes again."""
        for name, each in found.items():
            if name.startswith("output") and isinstance(each, Tensor) and each.numel() > 1:
                self.seen.setdefault(values_digest(each), f"call {self.calls}, {asked.step.label}")
        if asked.step.name:  # NaN, or other sizes
            return
        self.compared += 1
        for name, each in asked.expected.eager[asked.step.layout].items():
            if name.startswith("output") and isinstance(each, Tensor):
                self.outputs.add(values_digest(each))

    def _stale(self, found: Results, asked: Asked) -> Fault | None:
        """The fault of a wrong output that was the right one of an earlier call."""
        for name, each in found.items():
            if not name.startswith("output") or not isinstance(each, Tensor):
                continue
            if before := self.seen.get(values_digest(each)):
                words = f"{name} is the result of an earlier call: it was not computed again"
                return Fault("dishonest", words, asked.step.label, "a new result", before)
        return None

    def _recall(self, numbers: Sequence[int]) -> None:
        """Results of earlier calls must be as they were."""
        if not numbers:
            return
        request: Node = {"do": "recall", "ids": list(numbers)}
        header, blobs = self.talk.ask("earlier results", (request, []), self.kept_bytes)
        if "error" in header:
            raise Guilty(fault_of_error(header["error"], self.path.name, self.talk.doing))
        for number in numbers:
            answers, old, asked = self.kept.pop(number)
            self.kept_bytes -= sum(map(len, old))
            with readable():
                pairs = list(zip(answers, header["found"][str(number)], asked, strict=True))
            for before, now, one in pairs:
                require(faults_of_changes(before, old, now, blobs, one))
