"""Find the fastest schedule of each kernel by measurement, or in the store of earlier results.

A kernel's candidates are one translation unit. All are built first, in parallel. Then each kernel's
candidates are compared with the heuristic's schedule and timed in turns. The fastest is timed
against the heuristic's once more, and taken only if it wins beyond noise.
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
from fusewright.errors import CompileFailed
from fusewright.ir.graph import Sizes
from fusewright.ir.kernel import Kernel
from fusewright.kinds.kind import Choice
from fusewright.kinds.registry import heuristic, permitted, render
from fusewright.runtime import tensor_cores
from fusewright.target.device import architecture, precise_name
from fusewright.target.target import Target
from fusewright.tune import store as tuned
from fusewright.tune.candidates import worth_trying
from fusewright.tune.store import Tuned
from fusewright.tune.timing import samples_ms
from fusewright.tune.trial import TERMS, CompiledSchedule, Trial

NOISE = 0.02
LEAST_GAIN_US = 0.2  # the difference between one launch and the next
SCREEN_S = 0.4
DUEL_S = 0.4
LEAST_ROUNDS = 7
MOST_COMPILERS = 8
BUILD_SHARE = 0.6  # share of building in the progress bar

Sized = tuple[Kernel, Sizes]
# Called with the current action and the share of the work that is done.
OnProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class _Job:
    """A kernel to measure."""

    kernel: Kernel
    sizes: Sizes
    key: str
    choices: tuple[Choice, ...]


def settled(kernels: Sequence[Sized], target: Target, device: torch.device) -> dict[str, Tuned]:
    """Stored results that are still legal, by the kernels' current names."""
    stored, name = tuned.read(), precise_name(device)
    found: dict[str, Tuned] = {}
    for kernel, sizes in kernels if stored else ():
        each = stored.get(tuned.key_of(kernel, sizes, name, target))
        if each and (not each.changed or permitted(kernel, each.schedule, target)):
            found[kernel.name] = replace(each, kernel=kernel.name)
    return found


def chosen(kernel: Kernel, sizes: Sizes, target: Target, found: Tuned | None) -> Choice:
    """The measured schedule if it was faster than the heuristic's, else the heuristic's."""
    if found is not None and found.changed:
        return found.schedule
    return heuristic(kernel, target, sizes)


def tune(
    kernels: Sequence[Sized], target: Target, device: torch.device, progress: OnProgress
) -> dict[str, Tuned]:
    """Measure and store what is not known yet. Returns all known results."""
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
                tuned.keep({job.key: found})  # now, because a long run may be interrupted
    return known


def _jobs(kernels: Sequence[Sized], target: Target, device: torch.device) -> list[_Job]:
    name = precise_name(device)
    jobs = [
        _Job(each, at, tuned.key_of(each, at, name, target), worth_trying(each, target, at))
        for each, at in kernels
        if not each.is_empty(at)
    ]
    return [job for job in jobs if len(job.choices) > 1]


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _built(
    jobs: Sequence[_Job], target: Target, arch: str, folder: Path, progress: OnProgress
) -> list[list[CompiledSchedule]]:
    """The candidates of each job, compiled in parallel."""
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
) -> list[CompiledSchedule]:
    """One library of all candidates. If it cannot be compiled, one for each that can."""
    named = [(replace(kernel, name=f"{kernel.name}_{at}"), c) for at, c in enumerate(choices)]
    source = render(named, target)
    try:
        made = load(build(source, cache_dir=folder, arch=arch))
    except CompileFailed as error:
        if len(choices) > 1:
            alone = [_compiled(kernel, (each,), target, arch, folder) for each in choices]
            return [candidate for each in alone for candidate in each]
        _left_out(kernel, choices[0], f"it cannot be compiled: {error}")
        return []
    entries = {each.name: each.macro for each in source.entries}
    flags = dict.fromkeys(tensor_cores._FW_TERMS, lambda: TERMS)
    kernels = tensor_cores._FwPreciseKernels(entries, source.text, lambda _: made, flags)
    kernels.build()
    return [
        CompiledSchedule(choice, entry, kernels)
        for choice, entry in zip(choices, source.entries, strict=True)
    ]


def _left_out(kernel: Kernel, choice: Choice, why: str) -> None:
    warnings.warn(f"{kernel.name}: {choice} is left out: {why}", RuntimeWarning, stacklevel=3)


def _measured(job: _Job, candidates: list[CompiledSchedule], device: torch.device) -> Tuned | None:
    """The fastest candidate and the heuristic's. None if the heuristic's does not run."""
    if not candidates or candidates[0].choice != job.choices[0]:
        return None
    try:
        trial = Trial(job.kernel, job.sizes, device, candidates)
        faults = trial.faults(candidates)
    except torch.OutOfMemoryError:
        text = f"{job.kernel.name} is not tuned: the GPU has no memory left for its tensors"
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
        # The fastest of many may be lucky: it must win again, alone.
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
    calls: Mapping[int, Callable[[], object]], device: torch.device, budget_s: float
) -> dict[int, float]:
    """The median on a GPU. The lower quartile on the host, which also runs other programs."""
    share = 2 if device.type == "cuda" else 4
    named = {str(at): call for at, call in calls.items()}
    taken = samples_ms(named, device=device, budget_s=budget_s, least_rounds=LEAST_ROUNDS)
    return {at: 1e3 * sorted(taken[str(at)])[len(taken[str(at)]) // share] for at in calls}
