"""Which new values of buffers a kernel may write straight into the buffer.

Running statistics are read and replaced element by element by one kernel; writing them where they
are saves a copy each. The rule is narrow: the kernel reads the buffer at exactly the address it
writes, nobody reads the old value afterwards, and nothing looks at the buffer in another way.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusewright.ir.loop import Load, Store
from fusewright.plan.steps import Loop, Plan, View, inputs_of


def in_place(plan: Plan, mutated: Mapping[str, str]) -> dict[str, str]:
    """From `mutated` (value → buffer it replaces), what may be written in place."""
    specs = dict(plan.specs)
    allowed: dict[str, str] = {}
    for value, buffer in mutated.items():
        if specs.get(value) != specs.get(buffer) or list(mutated.values()).count(buffer) > 1:
            continue
        if buffer not in plan.outputs and _written_last(plan, value, buffer):
            allowed[value] = buffer
    return allowed


def _written_last(plan: Plan, value: str, buffer: str) -> bool:
    """Whether the loop that makes `value` is the last step to read `buffer`, as it should."""
    found = False
    for step in plan.steps:
        if isinstance(step, View) and buffer in inputs_of(step):
            return False
        if isinstance(step, Loop) and value in step.outputs:
            found = buffer in step.inputs and _same_address(step, value, buffer)
        elif found and buffer in inputs_of(step):
            return False
    return found


def _same_address(loop: Loop, value: str, buffer: str) -> bool:
    names = [each.name for each in loop.kernel.arguments]
    source = names[loop.inputs.index(buffer)]
    target = names[len(loop.inputs) + loop.outputs.index(value)]
    reads = {
        (each.access.strides, each.access.offset)
        for each in loop.kernel.body
        if isinstance(each, Load) and each.access.buffer == source
    }
    writes = {
        (each.access.strides, each.access.offset)
        for each in loop.kernel.body
        if isinstance(each, Store) and each.access.buffer == target
    }
    return len(reads) == 1 and reads == writes
