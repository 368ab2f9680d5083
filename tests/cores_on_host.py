"""Kernels for tensor cores as text for g++ and fibers; sm90_on_host.hpp has the instructions."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from fusewright.codegen.render import flattened
from fusewright.codegen.source import Source
from tests import loop_cases as cases
from tests.test_cuda_emulated import LAUNCH as PLAIN_LAUNCH
from tests.test_cuda_emulated import SHIM

STAND_IN = Path(__file__).parent / "sm90_on_host.hpp"
LAUNCH = re.compile(r"kernel<<<(\w+), (\w+), [^;]*?>>>\(([^;]*?)\);", re.DOTALL)
SHARED = re.compile(r"extern __shared__ __align__\(1024\) char memory\[\];")


def with_stand_in(name: str, pasted: set[str]) -> list[str]:
    """`flattened`, with the stand-in where the instructions would be."""
    if name == "sm90.cuh" or "sm90.cuh" in pasted:
        return flattened(name, pasted)
    pasted.add("sm90.cuh")
    return [*flattened(str(STAND_IN), pasted), *flattened(name, pasted)]


def on_host(text: str) -> str:
    """The same text for g++: launches become calls, the toolkit our shim."""
    text, cores = LAUNCH.subn(
        r"gridDim = dim3(\1); emulation::launch(dim3(\1), \2, [&] { kernel(\3); });", text
    )
    text, shared = SHARED.subn("char* const memory = emulated_shared;", text)
    text = PLAIN_LAUNCH.sub(r"emulation::launch(\2, \3, [&] { \1(\4); });", text)
    assert cores and shared and "<<<" not in text
    return SHIM + text


def host_library(text: str) -> ctypes.CDLL:
    return cases.compile_source(Source("host", text, ()), ("-O1", "-w"))


def library_of(header: str, *more: str) -> ctypes.CDLL:
    """A kernel's own text with entries of a test."""
    return host_library(on_host("\n".join([*with_stand_in(header, set()), *more])))
