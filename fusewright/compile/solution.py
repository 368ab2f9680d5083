"""From a model to a module that runs: `optimize` for programs, `solve` for problem files."""

from __future__ import annotations

import contextlib
import functools
import re
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

import torch
from torch import nn

from fusewright import debug
from fusewright.build import Artifact
from fusewright.capture.eager import always_fails_in_eager
from fusewright.capture.private import private
from fusewright.capture.reads import Watched
from fusewright.compile.call_kinds import DEVICES, arguments_of, sketch_of
from fusewright.compile.check import Example, found_different
from fusewright.compile.distance import Limits
from fusewright.compile.engine import FACTS, Front, Specialise, engine_of
from fusewright.compile.explanation import facts_of
from fusewright.compile.front import by_dynamo
from fusewright.compile.functions import optimized_function
from fusewright.compile.left_to_original import left_to_original
from fusewright.compile.loading import kernels_of, load, loader
from fusewright.compile.module import optimized
from fusewright.compile.owners import Modes, owners_of, pin
from fusewright.compile.pipeline import MODES, Prepared, prepare
from fusewright.compile.places import Places
from fusewright.compile.replayed import wants_replays, with_replays
from fusewright.compile.settings import Absent, example_arguments, refuse_other_settings
from fusewright.compile.stages import logged
from fusewright.compile.trusted import (
    require_no_effects_outside,
    require_python,
    trust_of,
    unguarded,
    worst_of,
)
from fusewright.emit.bundle import ModuleBundle, ProgramPlans, without_gradients
from fusewright.errors import (
    CaptureError,
    DeviceError,
    InternalError,
    LeftToEagerError,
    UnguardedError,
    first_line,
)
from fusewright.problem.nested import leaves
from fusewright.runtime import call, constants, library
from fusewright.target.device import device_name
from fusewright.tune.search import OnProgress

# Of the time before a module can run; the rest is the compiler's.
SHARE_PREPARED = 0.5


@dataclass(frozen=True)
class Solution:
    """A model, planned and compiled for one type of device. The libraries `built` so far took
    `seconds`, and no compiler ran if they were `cached`; other precisions are built when they are
    needed. Its guards look for the objects `watched` at their places, which are all that the
    `codes` of the trace need."""

    prepared: Prepared
    bundle: ModuleBundle
    built: tuple[Artifact, ...]
    seconds: float
    kernels: library._FwKernels
    watched: tuple[Watched, ...] = ()
    codes: frozenset[types.CodeType] = frozenset()
    cached: bool = False


@dataclass(frozen=True)
class Saveable:
    """What `save` writes: the programs of the example, and the modes that have none."""

    bundle: ModuleBundle
    left_out: tuple[tuple[str, str], ...]
    device: str


def device_of(model: nn.Module, args: Sequence[Any]) -> torch.device:
    """The device of the model's tensors, or of its arguments if it has none."""
    held = [*model.parameters(), *model.buffers()]
    held += [leaf for _, leaf in leaves("", tuple(args)) if isinstance(leaf, torch.Tensor)]
    return held[0].device if held else torch.device("cpu")


def solve(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "model",
    modes: Sequence[str] = MODES,
    tuning: OnProgress | None = None,
    changed: Sequence[str] = (),
    progress: OnProgress = lambda words, share: None,
    build: bool = True,
) -> Solution:
    """Capture, plan and compile `model` for the device it is on.

    Without `build`, kernels are compiled when they are needed: an emitted file builds its own. With
    `tuning`, schedules are measured, and `tuning` is called with the progress. `changed` are
    attributes that calls of the model are known to change. `progress` is called at the start of
    each stage with its name and the share of the work that is done.
    """
    require_python(model)
    device = device_of(model, args)
    if device.type not in DEVICES:
        raise DeviceError(f"there are no kernels for {device.type}: move the model to cpu or cuda")
    # Whatever mode the caller is in: gradients are captured, and later calls may want them.
    with torch.inference_mode(False), torch.enable_grad():
        traced, given, named = private(model, args, kwargs)
        prepared = prepare(
            traced,
            given,
            named,
            modes=modes,
            device=device,
            tuning=tuning,
            changed=changed,
            progress=lambda words, share: progress(words, share * SHARE_PREPARED),
        )
    if tuning is not None:
        tuning("compile the chosen schedules", 1.0)
    bundle = ModuleBundle(
        name=name,
        language=prepared.target.language,
        source=prepared.source,
        arguments=arguments_of(model, tuple(args), kwargs),
        modes=tuple(_with_owners(each, traced) for each in prepared.modes),
        autocast=_autocast(device),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
    )
    built: list[Artifact] = []
    load_text = loader(prepared.source, device, built)
    kernels = kernels_of(prepared.source, load_text)
    start = time.perf_counter()
    if build:
        progress("compile kernels", SHARE_PREPARED)
        kernels.build()
    return Solution(prepared, bundle, tuple(built), time.perf_counter() - start, kernels)


def _with_owners(plans: ProgramPlans, model: nn.Module) -> ProgramPlans:
    program = plans.program
    return replace(plans, owners=owners_of(model, program.mode, program.changed))


def _autocast(device: torch.device) -> str:
    """The dtype of autocast on this device. Empty if it is off."""
    if not torch.is_autocast_enabled(device.type):
        return ""
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")


def drivers(solution: Solution, replays: bool) -> Modes:
    """The programs of the module's text, with its kernels and what `explain` says of them. If
    `replays`, they are replayed by CUDA graphs where that is possible."""
    modes = load(solution.bundle, solution.kernels)
    for mode, plans in zip(modes, solution.bundle.modes, strict=True):
        vars(mode)[FACTS] = facts_of(plans, solution.bundle.autocast)
        mode.watched = solution.watched
    return with_replays(modes, solution.bundle.modes) if replays else modes


def _require_agreement(
    solution: Solution, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> None:
    """An error if the programs differ from eager on the example."""
    modes = load(solution.bundle, solution.kernels)
    limits = Limits(in_16_bits=bool(solution.bundle.autocast))
    found = found_different(Example(model, args, kwargs or {}), modes, limits)
    if found:
        raise LeftToEagerError(str(InternalError(found)))


def _specialise(
    name: str,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    changed: Sequence[str],
    *,
    check: bool = True,
    replays: bool = False,
) -> Modes:
    """Programs for a call that fits none so far, in the current mode only."""
    mode = "train" if model.training else "eval"
    settings: dict[str, Any] = {"name": name, "modes": (mode,), "changed": changed}
    solution = _trusted(model, args, kwargs, **settings)
    if check:
        _require_agreement(solution, model, args, kwargs)
    return drivers(solution, replays)


def warn_of(solution: Solution, stacklevel: int, *, in_a_file: bool = False) -> None:
    """Say which modes have no gradients of ours, and which run the original forward; and why. In a
    file, those are all that have no program."""
    said, prepared = list(without_gradients(solution.bundle.modes)), solution.prepared
    for mode, reason in prepared.left_out:
        if in_a_file or mode in prepared.eager:
            said.append(f"in {mode} mode the original forward runs: {reason}")
    for words in said:
        warnings.warn(words, RuntimeWarning, stacklevel=stacklevel + 1)


@contextlib.contextmanager
def told_once(solution: Solution) -> Iterator[None]:
    """Do not show the warnings of an emitted file that repeat `warn_of`."""
    with warnings.catch_warnings():
        for each in solution.bundle.modes:
            if each.program.forward_only:
                again = f"the original forward runs: {each.program.forward_only}"
                warnings.filterwarnings("ignore", re.escape(again))
        yield


_Function = TypeVar("_Function", bound=Callable[..., Any])


@overload
def optimize(
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    modes: Sequence[str] = MODES,
    tune: bool = False,
    check: bool = True,
    mode: str = "default",
) -> nn.Module: ...


@overload
def optimize(model: _Function, *, tune: bool = False, mode: str = "default") -> _Function: ...


@overload
def optimize(*, tune: bool = False, mode: str = "default") -> Callable[[_Function], _Function]: ...


def optimize(
    model: Any = Absent,
    example_inputs: Any = Absent,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    modes: Sequence[str] = MODES,
    tune: bool = False,
    check: bool = True,
    mode: str = "default",
) -> Any:
    """A module that shares `model`'s parameters and runs its operators in fused kernels.

    `example_inputs` is the argument, or the tuple of arguments, of one call. Other batch sizes run
    the same kernels. Other shapes, dtypes or devices compile new ones at the first call. What one
    graph cannot describe goes through torch.compile with our kernels: `explain` says why. The
    original forward runs, with a warning, if a trace differs from a real call of the example, and
    for calls with gradients if PyTorch cannot differentiate the model. If eager mode fails on the
    example, that is an error. With `tune`, several schedules of each kernel are measured first. The
    results are stored, and later calls on this machine use them.

    With `check`, new kernels are compared with eager once: outputs, gradients and buffers, on a
    copy of the model and on other values than the example's. If they differ, the original forward
    runs, with a warning.

    The mode "reduce-overhead" replays CUDA graphs: for models that are bound by launches.

    A function needs no example: it is compiled at its first call, by torch.compile with our
    kernels. So `optimize` is a decorator of functions, too, with or without `tune`.
    """
    if model is Absent:
        return functools.partial(optimize, tune=tune, mode=mode)
    if not isinstance(model, nn.Module) and example_inputs is Absent:
        return optimized_function(model, tune=tune, mode=mode)
    args = example_arguments(example_inputs, example_kwargs)
    refuse_other_settings(model, example_inputs, modes)
    name, replays = type(model).__name__, wants_replays(mode)
    tuning = logged if tune else None
    front = functools.partial(by_dynamo, tune=tune, replays=replays)
    again = functools.partial(_specialise, name, check=check, replays=replays)
    if left_to_original(model, args, example_kwargs or {}) is not None:
        return optimized(model, (), again, front=front)  # a call says why
    try:
        solution = _trusted(model, args, example_kwargs, name=name, modes=modes, tuning=tuning)
        if check:
            _require_agreement(solution, model, args, example_kwargs)
        made = drivers(solution, replays)
    except InternalError as error:
        call._fw_warn(f"{name}: {first_line(error)}")
        return optimized(model, eager=frozenset(MODES))
    except LeftToEagerError as error:
        call._fw_warn(first_line(error))
        return optimized(model, eager=frozenset(MODES))
    except UnguardedError as error:
        debug.log(1, "torch.compile runs %s: %s", name, error)
        ours = front if error.by_dynamo else None
        why, places = first_line(error), Places.named_by(error)
        # Only a pickle, which holds no places, asks for programs again, and finds the reason again.
        return optimized(model, (), again, front=ours, reason=why, places=places)
    warn_of(solution, stacklevel=2)
    return _module_of(solution, pin(made, model), model, args, example_kwargs or {}, again, front)


def _module_of(
    solution: Solution,
    pinned: Modes,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    again: Specialise,
    front: Front,
) -> nn.Module:
    """The optimized module with the programs of a solution. `again` makes those of other calls."""
    prepared = solution.prepared
    left_out = frozenset(mode for mode, _ in prepared.left_out) - prepared.eager
    known = frozenset((sketch_of(model, args, kwargs),))
    places = Places(solution.watched, codes=solution.codes)
    settings = (left_out, front, "", known, prepared.eager, places)
    fast = optimized(model, pinned, again, *settings)
    engine = engine_of(fast)
    assert engine is not None
    where = device_name(device_of(model, args))
    engine.source = Saveable(solution.bundle, prepared.left_out, where)
    return fast


def _trusted(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, **settings: Any
) -> Solution:
    """The solution, if our guards can tell for which calls it is right.

    Otherwise an UnguardedError: the call is for Dynamo or, if that would not notice a change
    either, for the original forward.
    """
    require_no_effects_outside(model, args, kwargs, settings["modes"])
    try:
        solution = solve(model, args, kwargs, **settings)
    except LeftToEagerError:
        raise
    except CaptureError as error:
        if isinstance(error, UnguardedError) or not always_fails_in_eager(model, args, kwargs):
            found = trust_of(model, args, kwargs, MODES)
            reason = str(error) if found.by_dynamo else found.reason
            raise unguarded(reason, found) from error
        raise
    modes = {each.program.mode for each in solution.prepared.modes}
    found = trust_of(model, args, kwargs, sorted(modes), solution.prepared.witnessed)
    if found.reason:
        found = worst_of([found, trust_of(model, args, kwargs, sorted({*MODES} - modes))])
        raise unguarded(found.reason, found)
    gone = [(place, name) for place, name, value in found.watched if value is constants._FwGone]
    absent = tuple((place, name) for place, name in gone if isinstance(place, tuple))
    bundle = replace(solution.bundle, absent=absent)
    return replace(solution, bundle=bundle, watched=found.watched, codes=found.codes)
