"""What this machine is: names for reports."""

from __future__ import annotations

import platform

import torch

from fusewright import __version__


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    found = {
        "fusewright": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found
