"""A library whose constructor replaces functions before anything is called."""

# verdict: dishonest crashed wrong unsafe

import ctypes
import subprocess
import tempfile
from pathlib import Path

from small import Model

SOURCE = """
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void first(void) { fflush(stdout); _exit(0); }
"""
folder = Path(tempfile.mkdtemp())
(folder / "first.cpp").write_text(SOURCE)
command = ["g++", "-shared", "-fPIC", "-o", "first.so", "first.cpp"]
subprocess.run(command, check=True, cwd=folder)
ctypes.CDLL(str(folder / "first.so"))


class ModelNew(Model): ...
