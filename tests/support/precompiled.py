"""Headers that every kernel includes, precompiled by g++: saves half a second a compilation.

Tests that build as users do catch a text that forgets to include one of them.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from fusewright import build

# First the headers that cuda_on_host.hpp begins with: its macro changes setjmp.h.
HEADERS = (
    "setjmp.h ucontext.h algorithm atomic cmath cstddef cstdint cstdio cstdlib cstring deque "
    "functional limits map memory numeric tuple type_traits utility vector"
).split()
TEXT = "#undef _FORTIFY_SOURCE\n" + "".join(f"#include <{name}>\n" for name in HEADERS)


def gxx() -> tuple[str, ...]:
    """The words that start g++: those of CXX where it calls g++, with a sanitizer maybe."""
    given = tuple(shlex.split(os.environ.get("CXX", "")))
    return given if "g++" in given else ("g++",)


# With AddressSanitizer kernels take more stack, and other compilers than g++ crash.
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")


def folder() -> Path:
    """A folder for this user that stays between runs."""
    made = Path(tempfile.gettempdir()) / "fusewright-tests"
    made.mkdir(mode=0o700, exist_ok=True)
    return made


@functools.cache
def included(command: tuple[str, ...]) -> tuple[str, ...]:
    """Flags that include the headers, precompiled with the flags of this g++ command."""
    kept = [each for each in command if each != "-shared"]
    key = hashlib.sha256(repr((kept, TEXT)).encode()).hexdigest()[:20]
    header = folder() / f"{key}.hpp"
    built = Path(f"{header}.gch")
    with (folder() / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            header.write_text(TEXT)
            fresh = built.with_suffix(".tmp")
            made = [*kept, "-x", "c++-header", str(header), "-o", str(fresh)]
            subprocess.run(made, check=True, stderr=subprocess.DEVNULL)
            fresh.rename(built)
    return "-include", str(header)


def quick_flags() -> tuple[str, ...]:
    """Flags for host kernels: with -Og, g++ takes a third of the time that it takes with -O3."""
    flags = tuple("-Og" if flag == "-O3" else flag for flag in build._HOST_FLAGS)
    used = "g++" in os.environ.get("CXX", "g++").split() and shutil.which("g++") is not None
    return (*flags, *(included((*gxx(), *flags)) if used else ()))


def use_quick_builds() -> None:
    """For this process, which is none of pytest."""
    build._HOST_FLAGS = quick_flags()
    os.environ.setdefault("FUSEWRIGHT_CACHE", str(folder() / "kernels"))
