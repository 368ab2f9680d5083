"""The opening words of an emitted file: what it is, where it was made, which kernels it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusewright import __version__
from fusewright.emit.bundle import ProgramPlans, without_gradients
from fusewright.plan.show import human_bytes, human_count


def opening_lines(
    name: str,
    device: str,
    versions: Mapping[str, str],
    left_out: Sequence[tuple[str, str]],
    plans: Sequence[ProgramPlans],
) -> list[str]:
    """What the file is, and which calls run the original forward."""
    lines = [
        f"{name}, with its operators fused by Fusewright {__version__}.",
        "",
        f"Made on {device}; " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".",
    ]
    for mode, reason in left_out:
        first = reason.split("\n")[0]
        lines += ["", f"In {mode} mode the original forward runs: {first}"]
    for words in without_gradients(plans):
        first = words.split("\n")[0]
        lines += ["", first[0].upper() + first[1:]]
    return lines


def kernel_lines(plans: Sequence[ProgramPlans]) -> list[str]:
    """Each kernel once, with its work."""
    lines = ["", "Kernels (bytes moved and scalar operations at the example's sizes):"]
    kernels: dict[str, str] = {}
    for step in (step for each in plans for _, plan in each.named for step in plan.kernels):
        work = f"{human_bytes(step.bytes_moved)}, {human_count(step.operations)} operations"
        kernels.setdefault(step.name, f"  {step.name}: {work}")
    return [*lines, *kernels.values()]
