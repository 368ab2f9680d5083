"""Loop kernels, rendered, built with g++ or nvcc, and called on tensors."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fusewright.codegen.source import Entry, Source
from fusewright.ir.loop import LoopKernel
from fusewright.kinds.registry import render
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose
from fusewright.target.target import Target
from tests.support.precompiled import SANITIZED, folder, gxx, included

FLAGS = (
    "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=off "
    "-fopenmp -shared -fPIC"
).split()
# Kernels on fibers: most of the time would be the optimiser's.
EMULATED = ("-Og", "-w")
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
if SANITIZED:
    NVCC = None


def compile_source(source: Source, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Build with g++ or nvcc, once per text: other processes wait for the one that builds."""
    cuda = source.language == "cuda"
    gencode = flags or ("-gencode", "arch=compute_90a,code=sm_90a")
    nvcc = [NVCC or "nvcc", "-std=c++17", "-O3", "-fmad=false", *gencode, "-shared"]
    host = (*gxx(), *FLAGS, *flags)
    command = [*nvcc, "-Xcompiler", "-fPIC"] if cuda else [*host, *included(host)]
    key = hashlib.sha256(repr((command, source.text)).encode()).hexdigest()[:20]
    library = folder() / f"{key}.so"
    if not library.exists():
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(command, source, library)
    return ctypes.CDLL(str(library))


def _compile(command: Sequence[str], source: Source, library: Path) -> None:
    text = library.with_suffix(".cu" if source.language == "cuda" else ".cpp")
    text.write_text(source.text)
    fresh = library.with_suffix(".tmp")  # so that no process loads half a library
    subprocess.run([*command, str(text), "-o", str(fresh)], check=True)
    fresh.rename(library)


def build(
    loop: LoopKernel,
    target: Target,
    sizes: Mapping[str, int] | None = None,
    schedule: Schedule | None = None,
) -> tuple[ctypes.CDLL, Source]:
    picked = schedule or choose(loop, target, sizes or {})
    source = render([(loop, picked)], target)
    return compile_source(source), source


@functools.cache
def together(
    loops: tuple[LoopKernel, ...], flags: tuple[str, ...] = (), **sizes: int
) -> dict[LoopKernel, tuple[ctypes.CDLL, Source]]:
    """Kernels of one test as one text for the host: g++ starts and reads the headers once."""
    target = Target.host()
    source, entries = in_one_text([(loop, choose(loop, target, sizes)) for loop in loops], target)
    library = compile_source(source, flags)
    return {
        loop: (library, replace(source, entries=(entry,)))
        for loop, entry in zip(loops, entries, strict=True)
    }


def run_among(
    loops: tuple[LoopKernel, ...],
    loop: LoopKernel,
    tensors: Mapping[str, torch.Tensor | None],
    sizes: Mapping[str, int],
) -> None:
    """Call one kernel for the host; it is built together with others for the same sizes."""
    call(*together(loops, **sizes)[loop], tensors, sizes, 2)


def in_one_text(
    picked: Sequence[tuple[LoopKernel, Schedule]], target: Target
) -> tuple[Source, list[Entry]]:
    """Kernels that may have equal names as one source, and the entry of each."""
    named = [
        (replace(loop, name=f"{loop.name}_{number}"), schedule)
        for number, (loop, schedule) in enumerate(picked)
    ]
    source = render(named, target)
    entries = {entry.name: entry for entry in source.entries}
    return source, [entries[loop.name] for loop, _ in named]


def run(
    loop: LoopKernel,
    tensors: Mapping[str, torch.Tensor | None],
    sizes: Mapping[str, int] | None = None,
    target: Target | None = None,
    schedule: Schedule | None = None,
    threads: int = 2,
) -> None:
    """Build one kernel and call it on tensors named as its arguments; None is a null pointer."""
    target = target or Target.host()
    library, source = build(loop, target, sizes, schedule)
    call(library, source, tensors, sizes or {}, threads)


def call(
    library: ctypes.CDLL,
    source: Source,
    tensors: Mapping[str, torch.Tensor | None],
    sizes: Mapping[str, int],
    where: int,
) -> None:
    entry = source.entries[0]
    given = [tensors[name] for name in entry.arguments]
    pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in given]
    numbers = [ctypes.c_int64(sizes[name]) for name in entry.symbols]
    device = next((t.device for t in given if t is not None), torch.device("cpu"))
    scratch = torch.empty(max(8, entry.workspace.at(sizes)), dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
    code = getattr(library, entry.name)(
        *pointers,
        *numbers,
        ctypes.c_void_p(scratch.data_ptr()),
        ctypes.c_int(where),
        ctypes.c_void_p(stream),
    )
    library.fw_error_text.restype = ctypes.c_char_p
    assert code == 0, library.fw_error_text(code)
