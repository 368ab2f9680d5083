"""Generated CUDA loops as text for g++: fibers stand in for the threads of a block.

Every index, guard, barrier, shuffle and split of the kernels is tested so. nvcc's code and the
GPU's memory model are not: tests/gpu tests these.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fusewright.codegen.source import Source
from fusewright.ir.loop import LoopKernel
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose, legal
from fusewright.target.target import Target
from tests.support import loop_runs

Scheduled = tuple[LoopKernel, Schedule]
CUDA = Target.cuda()
SHIM = (Path(__file__).parent / "cuda_on_host.hpp").read_text()
SHARED = re.compile(r"extern __shared__ __align__\(1024\) char memory\[\];")
LAUNCH = re.compile(
    r"\b(kernel|\w+_kernel<[^;]*?>)\s*<<<(\w+), ([^;]*?), (\w+), [^;]*?>>>\(([^;]*?)\);"
)


def emulated(source: Source) -> Source:
    """The same text for g++: launches become calls, and cuda_on_host.hpp replaces the toolkit."""
    text, count = LAUNCH.subn(r"emulation::launch(\2, \3, \4, [&] { \1(\5); });", source.text)
    assert count and "<<<" not in text
    text = SHARED.sub("char* const memory = emulated_shared;", text)
    return Source("host", SHIM + text, source.entries)


def run(
    loop: LoopKernel,
    tensors: Mapping[str, torch.Tensor | None],
    sizes: Mapping[str, int],
    schedule: Schedule | None = None,
    among: tuple[Scheduled, ...] = (),
) -> Schedule:
    """Call one kernel; it is built together with those it is `among`. Returns its schedule."""
    picked = schedule or choose(loop, CUDA, sizes)
    assert legal(loop, picked, CUDA)
    library, source = together(among or ((loop, picked),))[loop, picked]
    loop_runs.call(library, source, tensors, sizes, 0)
    return picked


@functools.cache
def together(picked: tuple[Scheduled, ...]) -> dict[Scheduled, tuple[ctypes.CDLL, Source]]:
    """Kernels of one test as one text: g++ starts and reads the headers once."""
    different = tuple(dict.fromkeys(picked))
    made, entries = loop_runs.in_one_text(different, CUDA)
    source = emulated(made)
    library = loop_runs.compile_source(source, loop_runs.EMULATED)
    return {
        each: (library, replace(source, entries=(entry,)))
        for each, entry in zip(different, entries, strict=True)
    }


def chosen(loops: Iterable[LoopKernel], **sizes: int) -> tuple[Scheduled, ...]:
    return tuple((loop, choose(loop, CUDA, sizes)) for loop in loops)
