"""Measure schedules: for each kernel the fastest that was tried, and what was found before.

A kernel's candidates are one translation unit. All are built first, side by side; then each
kernel's are run alone: checked against the heuristic's, timed in turns, and the fastest meets the
heuristic's once more. Only what wins there, beyond noise, is taken.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fusewright import debug
from fusewright.build import build, load
from fusewright.codegen.epilogue import Ended
from fusewright.codegen.render import render
from fusewright.codegen.source import Source
from fusewright.cost.conv_direct import DirectSchedule
from fusewright.errors import CompileFailed
from fusewright.ir.convolution import WindowKernel
from fusewright.ir.loop import LoopKernel
from fusewright.ir.matmul import ProductKernel
from fusewright.ir.weight_gradient import GradientKernel
from fusewright.plan.equal_kernels import Kernel
from fusewright.runtime import library, tensor_cores
from fusewright.schedule.choice import Schedule
from fusewright.schedule.tensor_core import (
    EndedSchedule,
    GradientSchedule,
    ProductSchedule,
    WindowSchedule,
)
from fusewright.target.device import architecture, precise_name
from fusewright.target.target import Target
from fusewright.tune import store as tuned
from fusewright.tune.candidates import Choice, heuristic, permitted, worth_trying
from fusewright.tune.store import Tuned
from fusewright.tune.timing import samples_ms
from fusewright.tune.trial import TERMS, Candidate, Trial

NOISE = 0.02
LEAST_GAIN_US = 0.2  # what one launch differs from the next by
SCREEN_S = 0.4
DUEL_S = 0.4
LEAST_ROUNDS = 7
MOST_COMPILERS = 8
BUILD_SHARE = 0.6  # of the time, for the progress bar

Sized = tuple[Kernel, Mapping[str, int]]
# Hears what is being done and the share of all that is done.
OnProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class _Job:
    """A kernel that is to be measured."""

    kernel: Kernel
    sizes: Mapping[str, int]
    key: str
    choices: tuple[Choice, ...]


def settled(kernels: Sequence[Sized], target: Target, device: torch.device) -> dict[str, Tuned]:
    """What is known from before and still fits, under the kernels' names of now."""
    kept = tuned.read()
    keys = _keys(kernels, target, device) if kept else {}
    found: dict[str, Tuned] = {}
    for kernel, _ in kernels:
        each = kept.get(keys.get(kernel.name, ""))
        if each and (not each.changed or permitted(kernel, each.schedule, target)):
            found[kernel.name] = replace(each, kernel=kernel.name)
    return found


def chosen(kernel: Kernel, sizes: Mapping[str, int], target: Target, found: Tuned | None) -> Choice:
    """The measured schedule where another than the heuristic's was faster, else that one."""
    if found is not None and found.changed:
        return found.schedule
    return heuristic(kernel, target, sizes)


def source_of(kernels: Sequence[tuple[Kernel, Choice]], target: Target) -> Source:
    """These kernels with these schedules as one translation unit."""
    loops: list[tuple[LoopKernel, Schedule]] = []
    ended: list[tuple[Ended, EndedSchedule]] = []
    gradients: list[tuple[GradientKernel, GradientSchedule]] = []
    for kernel, choice in kernels:
        match kernel, choice:
            case LoopKernel(), Schedule():
                loops.append((kernel, choice))
            case GradientKernel(), GradientSchedule():
                gradients.append((kernel, choice))
            case (
                (ProductKernel() | WindowKernel()),
                (ProductSchedule() | WindowSchedule() | DirectSchedule()),
            ):
                ended.append((kernel, choice))
            case _:
                raise AssertionError(f"{kernel.name} with {choice}")
    return render(loops, target, ended, gradients)


def tune(
    kernels: Sequence[Sized], target: Target, device: torch.device, progress: OnProgress
) -> dict[str, Tuned]:
    """Measure what is not known yet, keep it, and give back all that is known."""
    known = settled(kernels, target, device)
    jobs = [
        job
        for job in _jobs(kernels, target, device)
        if job.kernel.name not in known or known[job.kernel.name].heuristic != job.choices[0]
    ]
    with tempfile.TemporaryDirectory(prefix="fusewright-tune-") as folder:
        built = _built(jobs, target, architecture(device), Path(folder), progress)
        for at, job in enumerate(jobs):
            words = f"measure {job.kernel.name}: {len(job.choices)} schedules"
            progress(words, BUILD_SHARE + (1 - BUILD_SHARE) * at / len(jobs))
            with _on(device):
                found = _measured(job, built[at], device)
            if found is not None:
                known[job.kernel.name] = found
                # At once: who interrupts a long run keeps what it has found.
                tuned.keep({job.key: found})
    return known


def _keys(kernels: Sequence[Sized], target: Target, device: torch.device) -> dict[str, str]:
    name = precise_name(device)
    return {kernel.name: tuned.key_of(kernel, sizes, name, target) for kernel, sizes in kernels}


def _jobs(kernels: Sequence[Sized], target: Target, device: torch.device) -> list[_Job]:
    keys = _keys(kernels, target, device)
    jobs = [
        _Job(kernel, sizes, keys[kernel.name], worth_trying(kernel, target, sizes))
        for kernel, sizes in kernels
        if _has_work(kernel, sizes)
    ]
    return [job for job in jobs if len(job.choices) > 1]


def _has_work(kernel: Kernel, sizes: Mapping[str, int]) -> bool:
    if isinstance(kernel, GradientKernel):
        return kernel.geometry.result_elements(sizes) > 0
    loop = kernel if isinstance(kernel, LoopKernel) else kernel.epilogue
    return all(axis.size.at(sizes) > 0 for axis in loop.axes)


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# Building --------------------------------------------------------------------------------------


def _built(
    jobs: Sequence[_Job], target: Target, arch: str, folder: Path, progress: OnProgress
) -> list[list[Candidate]]:
    """Every job's candidates, compiled side by side."""
    workers = max(1, min(len(jobs), os.cpu_count() or 1, MOST_COMPILERS))
    with ThreadPoolExecutor(workers) as pool:
        waiting = [
            pool.submit(_compiled, job.kernel, job.choices, target, arch, folder) for job in jobs
        ]
        made = []
        for at, (job, each) in enumerate(zip(jobs, waiting, strict=True)):
            words = f"build {job.kernel.name}: {len(job.choices)} schedules"
            progress(words, BUILD_SHARE * at / len(jobs))
            made.append(each.result())
    return made


def _compiled(
    kernel: Kernel, choices: tuple[Choice, ...], target: Target, arch: str, folder: Path
) -> list[Candidate]:
    """One library of all or, where the compiler refuses that, one of each that it takes."""
    named = [(replace(kernel, name=f"{kernel.name}_{at}"), c) for at, c in enumerate(choices)]
    source = source_of(named, target)
    try:
        made = load(build(source, cache_dir=folder, arch=arch))
    except CompileFailed as error:
        if len(choices) > 1:
            alone = [_compiled(kernel, (each,), target, arch, folder) for each in choices]
            return [candidate for each in alone for candidate in each]
        _left_out(kernel, choices[0], f"it cannot be compiled: {error}")
        return []
    entries = {each.name: each.binding for each in source.entries}
    flags = dict.fromkeys(tensor_cores._FW_TERMS, lambda: TERMS)
    kernels = library._FwKernels(entries, source.text, flags, lambda _: made)
    kernels.build()
    return [
        Candidate(choice, entry, kernels)
        for choice, entry in zip(choices, source.entries, strict=True)
    ]


def _left_out(kernel: Kernel, choice: Choice, why: str) -> None:
    warnings.warn(f"{kernel.name}: {choice} is left out: {why}", RuntimeWarning, stacklevel=3)


# Measuring -------------------------------------------------------------------------------------


def _measured(job: _Job, candidates: list[Candidate], device: torch.device) -> Tuned | None:
    """The fastest candidate beside the heuristic's; None where that one does not run itself."""
    if not candidates or candidates[0].choice != job.choices[0]:
        return None
    try:
        trial = Trial(job.kernel, job.sizes, device, candidates)
        faults = trial.faults(candidates)
    except torch.OutOfMemoryError:
        text = f"{job.kernel.name} is not tuned: its tensors do not fit beside the model's"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return None
    for each, why in faults.items():
        _left_out(job.kernel, each.choice, why)
    if candidates[0] in faults:
        return None
    sound = {at: trial.call(each) for at, each in enumerate(candidates) if each not in faults}
    times = _times_us(sound, device, SCREEN_S)
    best = min(times, key=lambda at: times[at])
    if best:
        # The fastest of many is partly the luckiest: it must win again, alone.
        times = _times_us({at: sound[at] for at in (0, best)}, device, DUEL_S)
    if times[0] - times[best] <= max(NOISE * times[0], LEAST_GAIN_US):
        best = 0
    found = Tuned(
        kernel=job.kernel.name,
        device=precise_name(device),
        sizes=tuned.sizes_of(job.kernel, job.sizes),
        heuristic=job.choices[0],
        schedule=candidates[best].choice,
        heuristic_us=times[0],
        best_us=times[best],
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )
    debug.log(2, "%s", found)
    return found


def _times_us(
    calls: Mapping[int, Callable[[], int]], device: torch.device, budget_s: float
) -> dict[int, float]:
    """Medians on a GPU; on the host, where others run too, the lower quartile."""
    share = 2 if device.type == "cuda" else 4
    named = {str(at): call for at, call in calls.items()}
    taken = samples_ms(named, device=device, budget_s=budget_s, least_rounds=LEAST_ROUNDS)
    return {at: 1e3 * sorted(taken[str(at)])[len(taken[str(at)]) // share] for at in calls}
