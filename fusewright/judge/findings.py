"""Compares one answer of a candidate with the expected one, and says what is at fault."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fusewright.errors import ConfinementError, ProblemError, VerifyError
from fusewright.judge.box import NO_BOX, PROTECTED, TOO_MANY
from fusewright.judge.hints import missing_gradient, worst_element, wrong_value
from fusewright.judge.script import Step, with_infinities
from fusewright.judge.slices import check_slices
from fusewright.judge.verdict import Fault
from fusewright.judge.wire import EARLIER, BadMessage, Node, named_leaves, outline, tensor_of
from fusewright.verify.compare import Check, compare_answers
from fusewright.verify.reference import scaled
from fusewright.verify.scenarios import Expected, Question, Results, Usual

_SLACK = 4.0
_MOST_FORGIVEN, _FORGIVEN_SHARE = 3, 0.08
# What PyTorch says in backward of a tensor that was overwritten after it had been saved.
_INPLACE = "modified by an inplace operation"
# Files may silence warnings for themselves when they load, or print otherwise; calls may not.
_LEFT_BY_LOADING = ("warnings", "printing and logs")


@dataclass(frozen=True)
class Asked:
    """One call of a request: what is expected, the eager outputs as a node, the weights' digest.

    `detached` are outputs that require no gradient in the model.
    """

    step: Step
    expected: Expected
    eager_outputs: Node
    random: bool
    weights: str
    scalars: frozenset[str] = field(default_factory=frozenset)
    detached: tuple[str, ...] = ()

    @property
    def result_bytes(self) -> int:
        results = self.expected.eager[self.step.layout].values()
        return sum(each.nbytes for each in results if isinstance(each, Tensor))


def asked_beside(
    step: Step, question: Question, eager: Answered, usual: Mapping[str, Usual], weights: str
) -> Asked:
    """A call whose expected answer is that of eager in a process of its own."""
    results = {step.layout: results_of(eager)}
    expected = scaled(Expected(question, results, {}, usual=usual, why="compared with eager"))
    outputs = copy.deepcopy(eager.node["outputs"])
    for name, node in named_leaves("output", outputs):
        node["shares"] = eager.shares.get(name, [])
    return Asked(step, expected, outputs, bool(eager.node["random"]), weights)


_UNREADABLE = (
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    ArithmeticError,
    RecursionError,
)


@contextmanager
def readable() -> Iterator[None]:
    """BadMessage if an answer is not built as the launcher builds it."""
    try:
        yield
    except _UNREADABLE as error:
        raise BadMessage("it lacks a part or has a wrong one") from error


def faults_of_state(
    header: Node, *, loading: bool = False, own: frozenset[str] = frozenset()
) -> Iterator[Fault]:
    """What a request changed for everyone in the process; `own` changes are the model's, too."""
    state = header.get("state", {})
    for name in state.get("replaced", ()):
        yield Fault(
            "dishonest",
            f"the file replaces {name}, which no kernel needs to do",
            "functions that measure, compare or carry results",
            "as PyTorch and Python define them",
            f"another {name}",
        )
    before, after = state.get("before", {}), state.get("after", {})
    for name, value in before.items():
        if name in own or (loading and name in _LEFT_BY_LOADING):
            continue
        if after.get(name) != value:
            yield Fault(
                "unsafe",
                f"global state is left changed: {name}; restore it before forward returns",
                "global state",
                value,
                str(after.get(name)),
            )


def faults_of_memory(header: Node, weights: str, inputs: Sequence[str] = ()) -> Iterator[Fault]:
    """What a call did to memory that is not its own."""
    for name in (*inputs, *header.get("damaged", ())):
        yield Fault(
            "unsafe",
            f"a kernel writes outside the memory of {name}",
            "guard zones",
            "untouched",
            "overwritten",
        )
    for name in header.get("shared", ()):
        yield Fault(
            "unsafe",
            f"a deep copy of the module shares {name} with its original: a change of one changes "
            "the other",
            "a deep copy",
            "memory of its own",
            f"the original's {name}",
        )
    if "weights" in header and header["weights"] != weights:
        yield Fault(
            "unsafe",
            "a call changes the parameters; only an optimizer may do that",
            "parameters after the call",
            "as before",
            "other values, names, objects or requires_grad",
        )


@dataclass(frozen=True)
class Answered:
    """The answer to one call of a request: what `go` and `report` said, and what the judge saw.

    `changed` are the inputs that have other values now, and `spoiled` says whether an incoming
    gradient has. The model runs on `device`, where eager's results are.
    """

    node: Node
    blobs: Sequence[bytes]
    report: Node
    report_blobs: Sequence[bytes]
    shares: Node
    changed: Mapping[str, Tensor]
    spoiled: bool
    device: str = "cpu"


def results_of(answer: Answered) -> Results:
    """Outputs, gradients, buffers, attributes and changed inputs by name, as plain tensors."""

    def value(node: Node | None, blobs: Sequence[bytes]) -> object:
        if node is None:
            return None
        if "tensor" in node:
            found = tensor_of(blobs[node["tensor"]], node["dtype"], node["shape"])
            return found.to(answer.device)
        plain = node.get("plain", node.get("other"))
        # A Python float was computed in the model's precision and is compared in it.
        return torch.tensor(plain, dtype=torch.float32) if isinstance(plain, float) else plain

    mine, theirs, report = answer.blobs, answer.report_blobs, answer.report
    with readable():
        outputs = named_leaves("output", answer.node["outputs"])
        found = {name: value(node, mine) for name, node in outputs}
        gradients = answer.node.get("gradients", {})
        found |= {f"grad {name}": value(node, mine) for name, node in gradients.items()}
        found |= {f"buffer {name}": value(e, theirs) for name, e in report["buffers"].items()}
        changed = answer.changed.items()
        found |= {f"input {name}": each.to(answer.device) for name, each in changed}
        for full, node in report["attributes"].items():
            leaves = named_leaves(full, node) if node is not None else ()
            found |= {f"attribute {name}": value(each, theirs) for name, each in leaves}
    return found


def faults_of_form(answer: Answered, asked: Asked) -> Iterator[Fault]:
    """Types, containers and shared memory."""
    outputs, eager = answer.node["outputs"], asked.eager_outputs
    for name, node in named_leaves("output", outputs):
        if node.get("subclass"):
            yield Fault(
                "dishonest",
                f"{name} is a {node['other']}, which may compute later or compare as it likes; "
                "return a plain tensor",
                asked.step.label,
                "torch.Tensor",
                str(node["other"]),
            )
            return
    if outline(outputs) != outline(eager):
        words = "the outputs have other containers or types than the model's"
        yield Fault("wrong", words, asked.step.label, outline(eager), outline(outputs))
        return
    eagers = dict(named_leaves("output", eager))
    for name, _ in named_leaves("output", outputs):
        theirs = set(eagers[name].get("shares", ()))
        # What lies in an input or a weight lies there again in the next call.
        more = set(answer.shares.get(name, ())) - theirs - ({EARLIER} if theirs else set())
        for other in sorted(more):
            yield Fault(
                "unsafe",
                f"{name} shares memory with {other}: a change of one changes the other; return "
                "memory of its own",
                asked.step.label,
                "memory of its own, as in the model",
                f"memory of {other}",
            )
    if answer.spoiled:
        words = "backward writes into the incoming gradient, which others may hold"
        yield Fault("unsafe", words, asked.step.label, "a gradient as before", "other values")
    if answer.node["random"] and not asked.random:
        words = "the call changes the state of PyTorch's random numbers; the model does not"
        yield Fault("unsafe", words, asked.step.label, "generator as before", "another state")


def faults_of_forgiven(forgiven: Sequence[str], steps: int) -> Iterator[Fault]:
    """Gradients that were wrong now and then, far more often than by rounding at a kink."""
    if len(forgiven) > _MOST_FORGIVEN + _FORGIVEN_SHARE * steps:
        yield Fault(
            "wrong",
            "a gradient is wrong now and then, too often for rounding at a kink such as ReLU's "
            f"zero: in {len(forgiven)} of {steps} calls",
            forgiven[-1],
            "right gradients",
            "now right, now wrong",
        )


def has_other_strides(answer: Answered, asked: Asked) -> bool:
    """Whether outputs lie in memory in another order than the model's."""
    eager = dict(named_leaves("output", asked.eager_outputs))
    outputs = named_leaves("output", answer.node["outputs"])
    return any(node.get("stride") != eager[name].get("stride") for name, node in outputs)


def compare_with_right_runs(found: Results, asked: Asked, others: Sequence[Results]) -> list[Check]:
    """All checks again, beside further right runs of the model, for results that are a bit off.

    A judgement makes hundreds of checks, so a chance of one in a thousand is too much for each.
    Four times the usual bound is far below the errors of any lower precision.
    """
    expected = replace(asked.expected, others={asked.step.layout: others})
    checks = compare_call(found, replace(asked, expected=expected), others)
    return [replace(each, ok=True) if _is_near(each) else each for each in checks]


def _is_near(check: Check) -> bool:
    near = check.error <= _SLACK * check.allowed
    return check.is_only_inexact and near and check.largest <= _SLACK * check.largest_allowed


def compare_call(found: Results, asked: Asked, others: Sequence[Results] = ()) -> list[Check]:
    """All checks of a call: each result as a whole, and its slices."""
    expected, layout = asked.expected, asked.step.layout
    if asked.step.alter is with_infinities:
        found = _lost_statistics(found, expected.eager[layout])
    checks = list(compare_answers(found, layout, expected))
    truth = expected.truth.get(layout, {})
    # A result that is zero but for rounding has no digits to compare, in no part of it.
    right = {each.name: each.ok and not each.noise for each in checks}
    allowed = {each.name: each.allowed for each in checks}
    # If classes are wanted, a result of a coarser one is right, too.
    checks = [replace(each, ok=each.ok or bool(each.precision)) for each in checks]
    runs = [*others, *(each[layout] for each in expected.narrow.values())]
    for name, eager in expected.eager[layout].items():
        ours, true = found.get(name), truth.get(name)
        if not isinstance(eager, Tensor) or not isinstance(ours, Tensor) or not right.get(name):
            continue
        fits = isinstance(true, Tensor) and true.shape == eager.shape
        exact = true if fits and isinstance(true, Tensor) else None
        also = [each.get(name) for each in runs]
        check = check_slices(name, ours, eager, exact, also, allowed[name])
        checks += [check] if check else []
    return checks


def _lost_statistics(found: Results, eager: Results) -> Results:
    """A running statistic that an infinity has spoiled is lost, be it infinite or NaN."""

    def same(name: str, ours: object) -> object:
        theirs = eager.get(name)
        if not name.startswith("buffer ") or not isinstance(ours, Tensor):
            return ours
        if not isinstance(theirs, Tensor) or theirs.shape != ours.shape:
            return ours
        return torch.where(ours.isfinite() | theirs.isfinite(), ours, theirs.to(ours.dtype))

    return {name: same(name, each) for name, each in found.items()}


def fault_of_check(check: Check, found: Results, asked: Asked) -> Fault:
    """A wrong result in words, with its worst element."""
    name = check.name.split(", slice ")[0]
    layout = asked.step.layout
    eager = asked.expected.eager[layout].get(name)
    truth = asked.expected.truth.get(layout, {}).get(name, eager)
    ours = found.get(name)
    label = f"{asked.step.label}: {check.name}"
    if isinstance(eager, Tensor) and ours is None and name.startswith("grad "):
        target = name.removeprefix("grad ")
        gradients = {key: each for key, each in found.items() if key.startswith("grad ")}
        why = missing_gradient(target, gradients, target in asked.scalars)
        return Fault("wrong", why, label, "a gradient", "None")
    if name.startswith("input ") and eager is None:
        return Fault("unsafe", f"{name}: {check.note}", label, "as before", "other values")
    expected, seen = str(_short(eager)), str(_short(ours))
    if isinstance(ours, Tensor) and isinstance(truth, Tensor) and _comparable(ours, truth):
        place, expected, seen = worst_element(ours, truth)
        label += place
    hint = wrong_value(asked.step, check, ours)
    error = f"the error is {check.error:.1e}, {check.allowed:.1e} is allowed"
    what = check.note if check.note and not check.note.startswith("compared") else error
    return Fault("wrong", "; ".join(filter(None, (f"{name}: {what}", hint))), label, expected, seen)


def _comparable(ours: Tensor, truth: Tensor) -> bool:
    return ours.shape == truth.shape and truth.numel() > 0 and not truth.is_complex()


def _short(value: object) -> object:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return value


def other_outputs(error: VerifyError, asked: Asked) -> Fault:
    return Fault("wrong", str(error), asked.step.label)


def fault_of_error(error: Mapping[str, object], path: str, doing: str) -> Fault:
    """An exception in the candidate."""
    line = f"{path}:{error['line']}: " if error.get("line") else ""
    words = " ".join(str(error["words"]).split())
    # Our own error names the file, the line and what to do.
    seen = words if error["type"] == ProblemError.__name__ else f"{error['type']}: {words}"
    if _INPLACE in words:
        reason = "forward writes into an input, a weight or a tensor that backward needs"
        return Fault("unsafe", f"{line}{reason}", doing, "an answer", seen)
    return Fault("crashed", f"{line}{seen}", doing, "an answer", str(error["type"]))


def faults_of_changes(
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


def fault_of_end(code: int, doing: str, output: bytes) -> Fault:
    """A process that ended before it had answered everything."""
    if code == NO_BOX:
        words = output.decode(errors="replace").strip()
        raise ConfinementError(f"the candidate's process cannot be started: {words}")
    if code == 0:
        words = "the candidate ended its process with exit code 0 before it had answered"
        return Fault("dishonest", words, doing, "an answer", "exit code 0")
    if code == PROTECTED:
        words = "the candidate protects itself from being ended when memory runs out"
        return Fault("unsafe", words, doing, "oom_score_adj as before", "a lower one")
    if code == TOO_MANY:
        words = "the candidate started far too many processes"
        return Fault("unsafe", words, doing, "few processes", "hundreds")
    name = f"exit code {code}"
    if code > 128:
        with suppress(ValueError):
            name = signal.Signals(code - 128).name
    return Fault("crashed", f"the process ended with {name}", doing, "an answer", name)
