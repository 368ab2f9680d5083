"""nvcc, for all architectures in one run: the text is read, and the host's part built, once."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from fusewright.codegen.source import Source
from tests.support import nvcc
from tests.support.loop_runs import NVCC

needed = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
BOTH = ("80", "90a")
Spills = list[tuple[str, str, int]]  # architecture, kernel, bytes that went to memory
SPILLS = re.compile(r"entry function '(\S+)' for '(\S+)'.*?(\d+) bytes spill", re.DOTALL)


def gencode(archs: Sequence[str]) -> tuple[str, ...]:
    made = (("-gencode", f"arch=compute_{arch},code=sm_{arch}") for arch in archs)
    return tuple(word for words in made for word in words)


def compiled(text: str, folder: Path, *flags: str, archs: Sequence[str] = BOTH) -> Spills:
    """The spills of each kernel, if `-Xptxas -v` is given. kernels.o is left in the folder."""
    source = folder / "kernels.cu"
    source.write_text(text)
    always = ["-std=c++17", "-fmad=false", *gencode(archs)]
    command = [str(NVCC), *always, *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(arch, kernel, int(spilt)) for kernel, arch, spilt in SPILLS.findall(done.stderr)]


def read(text: str, folder: Path) -> None:
    """The text alone, for the newest architecture: optimizing large kernels takes a minute."""
    source = folder / "kernels.cu"
    source.write_text(text)
    flags = ["-std=c++17", "-Xcicc", "-O0", "-gencode", "arch=compute_90a,code=compute_90a"]
    command = [str(NVCC), *flags, "-cuda", str(source), "-o", str(source.with_suffix(".ii"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def no_spills(text: str, folder: Path) -> None:
    """No kernel spills registers, on either architecture."""
    found = compiled(text, folder, "-O3", "-Xptxas", "-v")
    assert {arch for arch, _, _ in found} == {f"sm_{arch}" for arch in BOTH}
    assert {spilt for _, _, spilt in found} == {0}


@functools.cache
def has_fast_compile() -> bool:
    """From CUDA 12.9 on."""
    said = subprocess.run([str(NVCC), "--help"], capture_output=True, text=True, check=True)
    return "--Ofast-compile" in said.stdout


def compile_as_emitted(source: Source, folder: Path, terms: int = 3) -> None:
    """Compile as emitted files do: for three terms everything, for one only what flags affect.

    With few device optimisations this takes a fifth of the time. test_cuda_sources.py checks the
    optimised kernels. One term is for the newer architecture.
    """
    flags = ["-O1"]
    flags += [f"-DFW_{name}={terms}" for name in ("PRODUCTS", "CONVOLUTIONS")]
    flags += ["-DFW_OTHERS=0"] if terms == 1 else []
    flags += ["--Ofast-compile", "max"] if has_fast_compile() else []
    nvcc.compiled(source.text, folder, *flags, archs=("90a",) if terms == 1 else nvcc.BOTH)
