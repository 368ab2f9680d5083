"""Is a candidate right? Its outputs, gradients and buffers against a float64 run of the model.

A problem and a maker of candidates come in, a `Report` of `Check`s goes out. Inputs are fresh at
every round and written over the candidate's old ones, so that nothing remembered by address
passes; memory is filled with NaN before the candidate runs, so that nothing unwritten does.
"""

from __future__ import annotations

import copy
import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fusewright.errors import FusewrightError, ProblemError, VerifyError
from fusewright.problem import inputs as feed
from fusewright.problem.inputs import LAYOUTS, move, resolve_device
from fusewright.problem.load import Problem
from fusewright.problem.nested import leaves, map_leaves
from fusewright.verify.compare import Check, Triple, compare, root_mean_square
from fusewright.verify.float64 import doubled, widened

__all__ = ["LAYOUTS", "Check", "Report", "move", "resolve_device", "verify"]

# Transposed and sliced gradients hold the values of the contiguous one, so the true gradients
# are needed for these two only.
_VALUE_LAYOUTS = ("contiguous", "expanded")


@dataclass(frozen=True)
class Report:
    """All checks of one candidate, in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)


@dataclass(frozen=True)
class _Round:
    """One comparison: the mode that all three models are in, and the arguments that they get."""

    label: str
    training: bool
    gradients: bool
    seed: int
    inputs: tuple[object, ...]
    spoiled: bool = False


@dataclass(frozen=True)
class _Run:
    """What came out of one model: gradients by layout and name, inputs as they are afterwards."""

    outputs: Mapping[str, object]
    gradients: Mapping[str, Mapping[str, Tensor | None]]
    buffers: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Eager:
    """The eager run, and what the other two models must be given to repeat it."""

    run: _Run
    tangents: Mapping[str, Tensor]
    input_gradients: bool
    random: bool


@dataclass(frozen=True)
class _Subjects:
    """The three models with the same parameters, and the buffers that each run starts from."""

    eager: nn.Module
    wide: nn.Module
    candidate: nn.Module
    buffers: Mapping[str, Tensor]


def verify(
    problem: Problem,
    candidate_factory: Callable[[], nn.Module],
    *,
    device: str | torch.device,
    modes: Sequence[str] = ("train", "eval"),
    seed: int | None = None,
) -> Report:
    """Compare a candidate with the model in every mode; a seed makes the run repeatable.

    The factory gives a module of its own: its parameters and buffers are overwritten.
    """
    where = resolve_device(device)
    seed = secrets.randbits(31) if seed is None else seed
    checks: list[Check] = []
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
        subjects = _subjects(problem, candidate_factory, where, seed)
        kept: dict[int, Tensor] = {}
        for round_ in _rounds(problem, where, modes, seed):
            checks += _check_round(subjects, round_, kept)
    return Report(tuple(checks))


def _subjects(
    problem: Problem, factory: Callable[[], nn.Module], device: torch.device, seed: int
) -> _Subjects:
    torch.manual_seed(seed)
    eager = problem.make_model().to(device)
    torch.manual_seed(seed)
    candidate = factory().to(device)
    _require_same_state(eager, candidate)
    torch.manual_seed(seed)
    _stir(eager)
    candidate.load_state_dict(eager.state_dict())
    buffers = {name: buffer.detach().clone() for name, buffer in eager.named_buffers()}
    return _Subjects(eager, copy.deepcopy(eager).double(), candidate, buffers)


def _require_same_state(eager: nn.Module, candidate: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        theirs = {name: _describe(value) for name, value in getattr(eager, kind)()}
        ours = {name: _describe(value) for name, value in getattr(candidate, kind)()}
        for name in {**theirs, **ours}:
            if theirs.get(name) != ours.get(name):
                raise VerifyError(
                    f"{kind.removeprefix('named_')} differ: {name} is {ours.get(name, 'not there')}"
                    f" in the candidate and {theirs.get(name, 'not there')} in the model"
                )


def _describe(value: Tensor) -> str:
    gradient = " with gradient" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{gradient}"


def _stir(model: nn.Module) -> None:
    """Move values off their initial ones, which a candidate could have written into its code."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + 0.1 * (torch.rand_like(parameter) - 0.5))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.1)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)


def _rounds(
    problem: Problem, device: torch.device, modes: Sequence[str], seed: int
) -> Iterator[_Round]:
    for index, mode in enumerate(modes):
        for gradients in (True, False):
            round_seed = seed + 2 * index + (not gradients)
            torch.manual_seed(round_seed)
            inputs = tuple(move(each, device) for each in problem.make_inputs())
            label = mode if gradients else f"{mode}, no_grad"
            yield _Round(label, mode == "train", gradients, round_seed, inputs)
        if index == len(modes) - 1 and any(
            map(feed.is_floating, dict(leaves("", inputs)).values())
        ):
            spoiled = tuple(map_leaves(feed.with_nan, each) for each in inputs)
            yield _Round(f"{mode}, NaN", mode == "train", False, round_seed, spoiled, True)


def _check_round(subjects: _Subjects, round_: _Round, kept: dict[int, Tensor]) -> tuple[Check, ...]:
    try:
        eager = _run_eager(subjects, round_)
    except Exception as error:
        if round_.spoiled and isinstance(
            error, RuntimeError | ValueError
        ):  # A model that refuses NaN has no answer to compare with.
            return ()
        what = f"{type(error).__name__}: {error}"
        raise ProblemError(f"the model itself fails in {round_.label}: {what}") from error
    truth, why_not = _run_wide(subjects, round_, eager)
    worst: dict[str, Check] = {}
    for layout in LAYOUTS if eager.tangents else LAYOUTS[:1]:
        ours = _run_candidate(subjects, round_, eager, layout, kept)
        for check in _compare_runs(ours, eager.run, truth, layout):
            if check.name not in worst or check.badness > worst[check.name].badness:
                worst[check.name] = check
    return tuple(_labelled(check, round_.label, why_not) for check in worst.values())


def _labelled(check: Check, label: str, remark: str) -> Check:
    note = "; ".join(filter(None, (check.note, remark)))
    return dataclasses.replace(check, name=f"{label}: {check.name}", note=note)


def _run_eager(subjects: _Subjects, round_: _Round) -> _Eager:
    def forward(gradients: bool) -> tuple[tuple[object, ...], dict[str, object], bool]:
        inputs = feed.copied(round_.inputs, gradients=gradients)
        return inputs, *_forward(subjects.eager, inputs, round_, subjects.buffers)

    wanted = round_.gradients
    try:
        inputs, outputs, random = forward(wanted)
    except RuntimeError as error:
        if not (wanted and "in-place" in str(error)):
            raise
        # A model that writes into its arguments cannot take leaves that require gradients.
        wanted = False
        inputs, outputs, random = forward(wanted)
    # Around one, not zero: a sum that cancels to nearly nothing has no digits to compare.
    tangents = {
        name: torch.randn_like(leaf, memory_format=torch.contiguous_format) + 1
        for name, leaf in outputs.items()
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    run = _finish(subjects.eager, inputs, outputs, tangents, LAYOUTS)
    return _Eager(run, tangents, wanted, random)


def _run_wide(subjects: _Subjects, round_: _Round, eager: _Eager) -> tuple[_Run | None, str]:
    """The float64 run, or None and the reason why there is none."""
    if eager.random:
        return None, "random model: compared with eager under the same seed"
    inputs = tuple(map_leaves(widened, each) for each in round_.inputs)
    inputs = feed.copied(inputs, gradients=eager.input_gradients)
    try:
        with doubled():
            outputs, _ = _forward(subjects.wide, inputs, round_, subjects.buffers)
            return _finish(subjects.wide, inputs, outputs, eager.tangents, _VALUE_LAYOUTS), ""
    except (RuntimeError, TypeError) as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        return None, f"compared with eager: no float64 run ({words})"


def _run_candidate(
    subjects: _Subjects, round_: _Round, eager: _Eager, layout: str, kept: dict[int, Tensor]
) -> _Run:
    inputs = feed.refilled(round_.inputs, kept, gradients=eager.input_gradients)
    gradients = (each for layer in eager.run.gradients.values() for each in layer.values())
    with feed.poisoned_memory((*eager.run.outputs.values(), *gradients)):
        try:
            outputs, _ = _forward(subjects.candidate, inputs, round_, subjects.buffers)
            ours = _finish(subjects.candidate, inputs, outputs, eager.tangents, (layout,))
        except FusewrightError:
            raise
        except Exception as error:
            raise VerifyError(
                f"the candidate fails in {round_.label}: {type(error).__name__}: {error}"
            ) from error
    if list(ours.outputs) != list(eager.run.outputs):
        raise VerifyError(
            f"the candidate returns {', '.join(ours.outputs) or 'nothing'} where the model "
            f"returns {', '.join(eager.run.outputs) or 'nothing'}"
        )
    return ours


def _forward(
    model: nn.Module, inputs: tuple[object, ...], round_: _Round, buffers: Mapping[str, Tensor]
) -> tuple[dict[str, object], bool]:
    """The named outputs, and whether the model drew random numbers."""
    model.train(round_.training)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    torch.manual_seed(round_.seed)
    before = _random_state()
    with torch.set_grad_enabled(round_.gradients):
        outputs = {name: _as_tensor(leaf) for name, leaf in leaves("output", model(*inputs))}
    after = _random_state()
    return outputs, not all(map(torch.equal, before, after))


def _as_tensor(leaf: object) -> object:
    # A Python float is a number that was computed in the model's precision, so it is compared so.
    return torch.tensor(leaf, dtype=torch.float32) if isinstance(leaf, float) else leaf


def _random_state() -> list[Tensor]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *devices]


def _finish(
    model: nn.Module,
    inputs: tuple[object, ...],
    outputs: Mapping[str, object],
    tangents: Mapping[str, Tensor],
    layouts: Sequence[str],
) -> _Run:
    """Run the backwards and take copies: what a model returns may be its own buffer or input."""
    targets = {name: leaf for name, leaf in feed.named_tensors(inputs) if leaf.requires_grad}
    targets.update((name, each) for name, each in model.named_parameters() if each.requires_grad)
    gradients = {
        layout: _gradients(outputs, tangents, targets, layout, keep=layout != layouts[-1])
        for layout in (layouts if tangents and targets else ())
    }
    return _Run(
        {name: _snapshot(leaf) for name, leaf in outputs.items()},
        gradients,
        {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        {name: leaf.detach().clone() for name, leaf in feed.named_tensors(inputs)},
    )


def _snapshot(leaf: object) -> object:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _gradients(
    outputs: Mapping[str, object],
    tangents: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    layout: str,
    *,
    keep: bool,
) -> dict[str, Tensor | None]:
    """The gradient of every target, or None where the outputs do not depend on it."""
    roots: list[Tensor] = []
    seeds: list[Tensor] = []
    for name, tangent in tangents.items():
        root = outputs.get(name)
        if isinstance(root, Tensor) and root.requires_grad and root.shape == tangent.shape:
            roots.append(root)
            seeds.append(feed.laid_out(tangent.to(root.dtype), layout))
    if not roots:
        return dict.fromkeys(targets)
    found = torch.autograd.grad(
        roots, list(targets.values()), seeds, retain_graph=keep, allow_unused=True
    )
    return dict(zip(targets, found, strict=True))


def _compare_runs(ours: _Run, eager: _Run, truth: _Run | None, layout: str) -> Iterator[Check]:
    best = truth or eager
    usual = _largest_rms((*best.outputs.values(), *best.inputs.values()))
    for name, leaf in eager.outputs.items():
        true = truth.outputs.get(name) if truth else None
        yield compare(name, Triple(ours.outputs[name], leaf, true, usual))
    for name, buffer in eager.buffers.items():
        true = truth.buffers.get(name) if truth else None
        yield compare(f"buffer {name}", Triple(ours.buffers.get(name), buffer, true, usual))
    for name, leaf in eager.inputs.items():
        true = truth.inputs.get(name) if truth else None
        check = compare(f"{name} afterwards", Triple(ours.inputs[name], leaf, true, usual))
        # An input that no one writes to is no result; one that somebody does write to is.
        if not check.ok or check.eager_error:
            yield check
    yield from _compare_gradients(ours, eager, truth, layout)


def _compare_gradients(ours: _Run, eager: _Run, truth: _Run | None, layout: str) -> Iterator[Check]:
    values = layout if layout in _VALUE_LAYOUTS else "contiguous"
    best = truth or eager
    usual = _largest_rms([each for layer in best.gradients.values() for each in layer.values()])
    for name, gradient in eager.gradients.get(layout, {}).items():
        mine = ours.gradients[layout].get(name)
        true = truth.gradients[values].get(name) if truth else None
        check = compare(f"grad {name}", Triple(mine, gradient, true, usual))
        note = "; ".join(filter(None, (f"{layout} gradient", check.note)))
        yield dataclasses.replace(check, note=note)


def _largest_rms(values: Sequence[object]) -> float:
    return max((root_mean_square(each) for each in values), default=0.0)
