"""The plan in words: what is fused, what stays a PyTorch call, and why."""

from __future__ import annotations

from typing import Protocol

from fusewright.ir.graph import Program
from fusewright.plan.steps import Call, Fused, Plan, View


class Planned(Protocol):
    """A program with its three plans."""

    @property
    def program(self) -> Program: ...
    @property
    def forward(self) -> Plan: ...
    @property
    def inference(self) -> Plan: ...
    @property
    def backward(self) -> Plan | None: ...


def human_bytes(count: int) -> str:
    """1234567 → 1.23 MB (powers of ten, as memory bandwidth is counted)."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def human_count(count: int) -> str:
    size = float(count)
    for unit in ("", " k", " M", " G"):
        if size < 1000:
            return f"{size:.0f}{unit}" if not unit else f"{size:.3g}{unit}"
        size /= 1000
    return f"{size:.3g} T"


def show(planned: Planned) -> str:
    """All three plans of a mode."""
    parts = [("forward", planned.forward), ("inference", planned.inference)]
    parts += [("backward", planned.backward)] if planned.backward else []
    head = [f"{planned.program.mode} mode"]
    head += [f"  algebra: {name}" for name in planned.program.algebra]
    return "\n".join([*head, *(show_plan(name, each) for name, each in parts)]) + "\n"


def show_plan(name: str, plan: Plan) -> str:
    lines = [f"  {name}"]
    for step in plan.steps:
        match step:
            case Fused():
                lines.append(
                    f"    fused  {step.name}: {step.kernel.summary}\n"
                    f"           reads {', '.join(step.inputs) or 'nothing'}; "
                    f"writes {', '.join(step.outputs)}; {human_bytes(step.bytes_moved)}, "
                    f"{human_count(step.operations)} operations"
                )
            case Call():
                lines.append(
                    f"    call   {step.node.op}: {step.reason}\n"
                    f"           {human_bytes(step.bytes_moved)}, "
                    f"{human_count(step.operations)} operations"
                )
            case View():
                lines.append(f"    view   {step.node.op} of {step.node.refs()[0]}: free")
    return "\n".join(lines)
