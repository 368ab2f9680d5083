"""What this machine is: names for reports, and for what was measured or built here."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from fusewright import __version__


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def precise_name(device: torch.device) -> str:
    """The same with the processor's model: what was measured on one says nothing of another."""
    if device.type == "cuda":
        return device_name(device)
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(errors="replace").splitlines() if facts.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def architecture(device: torch.device) -> str:
    """sm_90a for Hopper, whose own instructions need the suffix; sm_XY otherwise."""
    if device.type != "cuda":
        return "native"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def versions() -> dict[str, str]:
    found = {
        "fusewright": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found
