"""How an emitted file compiles host kernels: it calls the C++ compiler, without torch headers."""

import os
import pathlib
import platform
import shlex
import shutil
import subprocess

# The same flags as in Fusewright's build.py, so that users run the code that was checked.
_FW_FLAGS = (
    "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=off "
    "-fopenmp -shared -fPIC"
)


def _fw_recipe() -> list[str]:
    """Flags, compiler and processor: different machines may share a home folder."""
    facts = pathlib.Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else [platform.processor()]
    processor = sorted({line for line in lines if not line.startswith(("processor", "cpu MHz"))})
    return [_FW_FLAGS, platform.machine(), os.environ.get("CXX", "c++"), *processor]


def _fw_build(text: str, name: str, folder: pathlib.Path) -> None:
    """Compile into `folder`. RuntimeError if the compiler is missing or fails."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(f"the C++ compiler {compiler[0]!r} is missing; install g++ or set CXX")
    source, built = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(text, encoding="utf-8")
    command = [*compiler, *_FW_FLAGS.split(), str(source), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
