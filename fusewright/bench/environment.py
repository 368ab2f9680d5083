"""Where a benchmark ran: machine, versions, flags, commit, command, and clocks during the run."""

from __future__ import annotations

import hashlib
import operator
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fusewright.bench.record import Clocks, Environment
from fusewright.target.device import device_name, versions
from fusewright.verify.flags import flags

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
)
_CLOCK_FIELDS = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
_TOOL_LIMIT_S = 20
_SOURCES = (".py", ".hpp", ".cuh")


def look_around(device: torch.device, command: str) -> Environment:
    """Everything except the clocks, which are read between phases."""
    found = dict(versions())
    cudnn: Any = torch.backends.cudnn
    if cudnn.is_available():
        found["cudnn"] = str(cudnn.version())
    return Environment(
        device=device_name(device),
        cpu=cpu_name(),
        driver=_smi(device, "driver_version") if device.type == "cuda" else "",
        versions={**found, "system": platform.platform()},
        flags=flags(),
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        commit=commit(),
        command=command,
        source_sha256=source_sha256(),
    )


def is_same_place(old: Environment, new: Environment) -> bool:
    """Whether machine, versions and our own code are the same, so that old times still hold.

    Flags and variables are left out, because a problem may set them when it is loaded.
    """
    facts = operator.attrgetter("device", "cpu", "driver", "versions", "source_sha256")
    return bool(facts(old) == facts(new))


def this_command() -> str:
    """The command line, ready to be typed again."""
    return shlex.join(["python", "-m", "fusewright", *sys.argv[1:]])


def clocks(device: torch.device, when: str) -> tuple[Clocks, ...]:
    """The GPU's clocks now; empty without a GPU or without nvidia-smi."""
    if device.type != "cuda":
        return ()
    numbers = [_number(each) for each in _smi(device, _CLOCK_FIELDS).split(",")]
    return (Clocks(when, *numbers),) if len(numbers) == 4 else ()


def commit() -> str:
    """The commit of Fusewright's source, marked if it has changed since; empty outside git."""
    here = Path(__file__).resolve().parent
    name = _output(["git", "-C", str(here), "rev-parse", "HEAD"])
    changed = _output(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"])
    return f"{name}, changed" if name and changed else name


def source_sha256() -> str:
    """A hash of all of Fusewright's code that a measurement may depend on: all except page/."""
    root = Path(__file__).resolve().parents[1]
    files = (each for each in root.rglob("*") if each.suffix in _SOURCES)
    digest = hashlib.sha256()
    for each in sorted(files):
        if "page" not in each.relative_to(root).parts[:1]:
            digest.update(f"{each.relative_to(root)}\n".encode() + each.read_bytes())
    return digest.hexdigest()


def cpu_name() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def _smi(device: torch.device, fields: str) -> str:
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    options = [f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    found = _output(["nvidia-smi", f"--id={uuid}", *options])
    return found or _output(["nvidia-smi", *options]).split("\n")[0]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0  # nvidia-smi prints [N/A] for a figure that the machine hides


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
