"""Kernels in words: their operators, and names made of them."""

from __future__ import annotations

import re

from fusewright.ir.loop import Apply, Load, LoopKernel, Reduce, Scan
from fusewright.ir.operators import SCANS

MAX_NAME_WORDS = 4
WITH_EPILOGUE = ("mm", "bmm", "convolution")
_SPLIT = ("finite_magnitude", "max", "fp16_scale", "mul", "sub", "reciprocal")


def operators_of(kernel: LoopKernel) -> tuple[str, ...]:
    """The operators of a kernel, in its body's order."""
    found = []
    for item in kernel.body:
        if isinstance(item, Apply) and item.op != "cast":
            found.append(item.op)
        elif isinstance(item, Reduce):
            found.append({"welford": "var_mean"}.get(item.kind, item.kind))
        elif isinstance(item, Scan):
            found.append(SCANS[item.kind][1])
    if not found and any(isinstance(x, Load) and x.access.guards for x in kernel.body):
        return ("pad",)
    return tuple(_with_splits(found))


def _with_splits(words: list[str]) -> list[str]:
    """Replace the six operators that split a matrix into fp16 parts by one word."""
    count = min(words.count(word) for word in _SPLIT)
    for word in _SPLIT * count:
        last = len(words) - 1 - words[::-1].index(word)
        words = words[:last] + words[last + 1 :]
    return words + ["split"] * count


def epilogue_step_name(operators: tuple[str, ...]) -> str:
    """The same for matmuls and convolutions; their own word is always part of the name."""
    at = next(at for at, word in enumerate(operators) if word in WITH_EPILOGUE)
    return loop_name((*operators[: min(at, 1)], *operators[at:]))


def loop_name(operators: tuple[str, ...]) -> str:
    """custom_add_relu: the operators in order, with repetitions and long tails shortened."""
    words: list[str] = []
    for word in operators:
        if not words or words[-1] != word:
            words.append(re.sub(r"\W", "_", word))
    if not words:
        return "custom_copy"
    if len(words) > MAX_NAME_WORDS:
        words = [*words[: MAX_NAME_WORDS - 2], "to", words[-1]]
    return "custom_" + "_".join(words)
