"""What every kernel's text includes, read by g++ once: half a second of each compilation.

A text that forgets one of these is found out by tests that build as users do.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path

# Before them what cuda_on_host.hpp begins with: it decides what setjmp.h gives.
HEADERS = (
    "setjmp.h ucontext.h algorithm atomic cmath cstddef cstdint cstdio cstdlib cstring deque "
    "functional limits map memory numeric tuple type_traits utility vector"
).split()
TEXT = "#undef _FORTIFY_SOURCE\n" + "".join(f"#include <{name}>\n" for name in HEADERS)


def folder() -> Path:
    """Kept between runs, and for this user alone."""
    made = Path(tempfile.gettempdir()) / "fusewright-tests"
    made.mkdir(mode=0o700, exist_ok=True)
    return made


@functools.cache
def included(command: tuple[str, ...]) -> tuple[str, ...]:
    """Flags beside those of this g++ command; other flags would need headers of their own."""
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
