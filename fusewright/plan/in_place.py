"""Which new values of buffers a kernel may write straight into the buffer.

One kernel reads and replaces running statistics element by element; writing them in place saves a
copy each. The rule is narrow: the kernel reads the buffer at exactly the address that it writes,
nothing reads the old value afterwards, and no view of the buffer exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fusewright.plan.steps import Fused, Plan, Step, View, inputs_of


def in_place(plan: Plan, mutated: Mapping[str, str]) -> dict[str, str]:
    """From `mutated` (value → buffer it replaces), the pairs that may be written in place."""
    specs = dict(plan.specs)
    times, outputs = Counter(mutated.values()), set(plan.outputs)
    makers, readers = _makers_and_readers(plan)
    allowed: dict[str, str] = {}
    for value, buffer in mutated.items():
        if specs.get(value) != specs.get(buffer) or times[buffer] > 1 or buffer in outputs:
            continue
        if _written_last(value, buffer, makers.get(value), readers.get(buffer, [])):
            allowed[value] = buffer
    return allowed


def _makers_and_readers(plan: Plan) -> tuple[dict[str, Fused], dict[str, list[Step]]]:
    """The kernel that computes each value, and the steps that read it, in their order."""
    makers: dict[str, Fused] = {}
    readers: dict[str, list[Step]] = {}
    for step in plan.steps:
        if isinstance(step, Fused):
            makers.update(dict.fromkeys(step.outputs, step))
        for name in inputs_of(step):
            readers.setdefault(name, []).append(step)
    return makers, readers


def _written_last(value: str, buffer: str, maker: Fused | None, readers: list[Step]) -> bool:
    """Whether the kernel that computes `value` is the last step to read `buffer`."""
    if maker is None or not readers or readers[-1] is not maker:
        return False
    no_view = not any(isinstance(step, View) for step in readers)
    return no_view and _same_address(maker, value, buffer)


def _same_address(step: Fused, value: str, buffer: str) -> bool:
    names = [each.name for each in step.kernel.arguments]
    source = names[step.inputs.index(buffer)]
    return step.kernel.overwrites(source, names[len(step.inputs) + step.outputs.index(value)])
