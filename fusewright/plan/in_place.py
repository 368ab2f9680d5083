"""Which new values of buffers a kernel may write straight into the buffer.

One kernel reads and replaces running statistics element by element; writing them in place saves a
copy each. The rule is narrow: the kernel reads the buffer at exactly the address that it writes,
nothing reads the old value afterwards, and no view of the buffer exists.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusewright.plan.steps import Fused, Plan, View, inputs_of


def in_place(plan: Plan, mutated: Mapping[str, str]) -> dict[str, str]:
    """From `mutated` (value → buffer it replaces), the pairs that may be written in place."""
    specs = dict(plan.specs)
    allowed: dict[str, str] = {}
    for value, buffer in mutated.items():
        if specs.get(value) != specs.get(buffer) or list(mutated.values()).count(buffer) > 1:
            continue
        if buffer not in plan.outputs and _written_last(plan, value, buffer):
            allowed[value] = buffer
    return allowed


def _written_last(plan: Plan, value: str, buffer: str) -> bool:
    """Whether the kernel that computes `value` is the last step to read `buffer`."""
    found = False
    for step in plan.steps:
        if isinstance(step, View) and buffer in inputs_of(step):
            return False
        if isinstance(step, Fused) and value in step.outputs:
            found = buffer in step.inputs and _same_address(step, value, buffer)
        elif found and buffer in inputs_of(step):
            return False
    return found


def _same_address(step: Fused, value: str, buffer: str) -> bool:
    names = [each.name for each in step.kernel.arguments]
    source = names[step.inputs.index(buffer)]
    return step.kernel.overwrites(source, names[len(step.inputs) + step.outputs.index(value)])
