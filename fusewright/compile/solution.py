"""From a model to something that runs: `optimize` for programs, `solve` for problem files."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fusewright import debug
from fusewright.build import Artifact, Libraries, build_divided
from fusewright.compile.module import (
    Modes,
    arguments_of,
    kernels_of,
    load,
    optimized,
    owners_of,
    pin,
)
from fusewright.compile.pipeline import MODES, Prepared, prepare
from fusewright.emit.bundle import ModuleBundle
from fusewright.errors import DeviceError, ProblemError
from fusewright.problem.nested import leaves
from fusewright.runtime import library
from fusewright.target.device import architecture
from fusewright.tune.search import OnProgress


@dataclass(frozen=True)
class Solution:
    """A model, planned and compiled for one kind of device; libraries of other precisions may come
    after those that were `built`, in so many `seconds`."""

    prepared: Prepared
    bundle: ModuleBundle
    built: tuple[Artifact, ...]
    seconds: float
    kernels: library._FwKernels

    @property
    def cached(self) -> bool:
        return all(each.cached for each in self.built)


def device_of(model: nn.Module, args: Sequence[Any]) -> torch.device:
    """Where the model's tensors are; a model without any runs where its arguments are."""
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
) -> Solution:
    """Capture, plan and compile `model` for the device it is on.

    `tuning`, where it is given, has schedules measured and hears how far that is.
    """
    device = device_of(model, args)
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"there are no kernels for {device.type}: move the model to cpu or cuda")
    prepared = prepare(model, args, kwargs, modes=modes, device=device, tuning=tuning)
    if tuning is not None:
        tuning("compile what was chosen", 1.0)
    bundle = ModuleBundle(
        name=name,
        language=prepared.target.language,
        source=prepared.source,
        arguments=arguments_of(model, tuple(args), kwargs),
        modes=tuple(
            replace(each, owners=owners_of(model, each.program.mode)) for each in prepared.modes
        ),
        autocast=_autocast(device),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
    )
    built: list[Artifact] = []

    def load_text(text: str) -> Libraries:
        found = build_divided(replace(prepared.source, text=text), arch=architecture(device))
        built.extend(found)
        return Libraries(found)

    kernels = kernels_of(prepared.source, load_text)
    start = time.perf_counter()
    kernels.build()
    return Solution(prepared, bundle, tuple(built), time.perf_counter() - start, kernels)


def _autocast(device: torch.device) -> str:
    """The type that autocast converts to on this device, or nothing where it is off."""
    if not torch.is_autocast_enabled(device.type):
        return ""
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")


def drivers(solution: Solution) -> Modes:
    """The module's text, executed over its kernels."""
    return load(solution.bundle, solution.kernels)


def _specialise(
    name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Modes:
    """New programs for a call that no program fits: the mode it is made in, nothing more."""
    mode = "train" if model.training else "eval"
    return drivers(solve(model, args, kwargs, name=name, modes=(mode,)))


def _unheard(words: str, share: float) -> None:
    debug.log(1, "%s", words)


def optimize(
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    modes: Sequence[str] = MODES,
    tune: bool = False,
) -> nn.Module:
    """A module like `model`, sharing its parameters, whose operators run in fused kernels.

    `example_inputs` is the argument, or the tuple of arguments, of one call. Another batch size
    runs the same kernels; another shape, type or device compiles new ones at the first call.
    A mode that cannot be captured runs the original forward, with a warning, unless it is the only
    one asked for. `tune` has several schedules of each kernel measured first; what is found is
    kept, and used by every later call on this machine.
    """
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        kind = type(example_kwargs).__name__
        words = f"example_kwargs is of type {kind}: several inputs are one tuple, (model, (a, b))"
        raise ProblemError(words)
    args = tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)
    name = type(model).__name__
    tuning = _unheard if tune else None
    solution = solve(model, args, example_kwargs, name=name, modes=modes, tuning=tuning)
    left_out = frozenset(mode for mode, _ in solution.prepared.left_out)
    modes_made = pin(drivers(solution), model)
    return optimized(model, modes_made, functools.partial(_specialise, name), left_out)
