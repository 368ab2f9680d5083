"""Where a benchmark ran: machine, versions, flags, commit, command, and the clocks on the way."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fusewright.bench.record import Clocks, Environment
from fusewright.machine import device_name, versions

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


def look_around(device: torch.device, command: str) -> Environment:
    """Everything but the clocks, which are looked at between phases."""
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
    )


def this_command() -> str:
    """The command line as it can be typed again."""
    return shlex.join(["python", "-m", "fusewright", *sys.argv[1:]])


def flags() -> dict[str, str]:
    """PyTorch's switches that decide speed and precision."""
    cudnn = torch.backends.cudnn
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda.matmul.allow_tf32": str(torch.backends.cuda.matmul.allow_tf32),
        "cudnn.allow_tf32": str(cudnn.allow_tf32),
        "cudnn.benchmark": str(cudnn.benchmark),
        "cudnn.deterministic": str(cudnn.deterministic),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "threads": str(torch.get_num_threads()),
    }


def clocks(device: torch.device, when: str) -> tuple[Clocks, ...]:
    """One look at the GPU, or none where there is no GPU or no nvidia-smi."""
    if device.type != "cuda":
        return ()
    numbers = [_number(each) for each in _smi(device, _CLOCK_FIELDS).split(",")]
    return (Clocks(when, *numbers),) if len(numbers) == 4 else ()


def commit() -> str:
    """The commit of Fusewright's own source, marked where it was changed since; empty if none."""
    here = Path(__file__).resolve().parent
    name = _output(["git", "-C", str(here), "rev-parse", "HEAD"])
    changed = _output(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"])
    return f"{name}, changed" if name and changed else name


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
        return 0.0  # nvidia-smi says [N/A] where a machine hides a figure.


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
