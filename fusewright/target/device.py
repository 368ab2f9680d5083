"""This machine's devices: their names, their targets, and the versions of software."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

import torch

from fusewright import __version__
from fusewright.errors import DeviceError, FusewrightError
from fusewright.runtime import gpu, tensor_cores
from fusewright.target.facts import H200
from fusewright.target.target import TRIALS, Target


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def precise_name(device: torch.device) -> str:
    """The name with the CPU's model, because measurements hold for one model only."""
    if device.type == "cuda":
        return device_name(device)
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(errors="replace").splitlines() if facts.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def architecture(device: torch.device) -> str:
    """nvcc's name of the GPU. The host's compiler detects the CPU itself."""
    if device.type != "cuda":
        return "native"
    capability = torch.cuda.get_device_capability(device)
    try:
        return gpu._fw_architecture(*capability)
    except RuntimeError as error:
        raise DeviceError(str(error)) from error


def target_of(device: torch.device) -> Target:
    """The target for this device, with PyTorch's current precision flags.

    A GPU that was not measured gets the rates of the H200, and its own counts from the driver.
    """
    if device.type != "cuda":
        return Target.host()
    found = torch.cuda.get_device_properties(device)
    facts = replace(
        H200,
        name=found.name,
        sms=found.multi_processor_count,
        shared_bytes=found.shared_memory_per_multiprocessor,
    )
    return Target.cuda(
        facts,
        tensor_cores=gpu._fw_has_tensor_cores(found.major, found.minor),
        trials=_trials(),
        tf32=tensor_cores._fw_terms() == 1,
        conv_tf32=tensor_cores._fw_conv_terms() == 1,
    )


def _trials() -> tuple[str, ...]:
    """Features that the user wants to try before they are the default."""
    wanted = tuple(filter(None, os.environ.get("FUSEWRIGHT_TRY", "").split(",")))
    unknown = [each for each in wanted if each not in TRIALS]
    if unknown:
        raise FusewrightError(f"FUSEWRIGHT_TRY={','.join(unknown)!r}: it takes {','.join(TRIALS)}")
    return wanted


def versions() -> dict[str, str]:
    found = {"fusewright": __version__, "torch": str(torch.__version__)}
    found["python"] = platform.python_version()
    return {**found, "cuda": torch.version.cuda} if torch.version.cuda else found
