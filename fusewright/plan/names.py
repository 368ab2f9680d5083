"""Kernels in words: their operators, and names made of them."""

from __future__ import annotations

import re

from fusewright.ir.loop import Apply, Load, LoopKernel, Reduce, Scan
from fusewright.ir.operators import SCANS

MAX_NAME_WORDS = 6
ENDED = ("mm", "bmm", "convolution")
_PLACED = ["gt", "isnan", "logical_or", "where", "maximum"]  # one tap of max pooling with places
_SPLIT = ("finite_magnitude", "max", "half_scale", "mul", "sub", "reciprocal")


def operators_of(kernel: LoopKernel) -> tuple[str, ...]:
    """What a kernel does, in its body's order."""
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
    return tuple(_with_splits(_with_places(found)))


def _with_places(words: list[str]) -> list[str]:
    made: list[str] = []
    for word in words:
        made.append(word)
        if made[-len(_PLACED) :] == _PLACED:
            made[-len(_PLACED) :] = ["max_with_place"]
    return made


def _with_splits(words: list[str]) -> list[str]:
    """The six operators that split a matrix into halves as one word, where all are there."""
    count = min(words.count(word) for word in _SPLIT)
    for word in _SPLIT * count:
        last = len(words) - 1 - words[::-1].index(word)
        words = words[:last] + words[last + 1 :]
    return words + ["split"] * count


def ended_name(operators: tuple[str, ...]) -> str:
    """The same for products and convolutions, of which the word is always there."""
    at = next(at for at, word in enumerate(operators) if word in ENDED)
    before = operators[:at] if at < 3 else (*operators[:1], "to", operators[at - 1])
    return loop_name((*before, *operators[at:]))


def loop_name(operators: tuple[str, ...]) -> str:
    """custom_add_relu: the operators in order, runs and long tails shortened."""
    words: list[str] = []
    for word in operators:
        if not words or words[-1] != word:
            words.append(re.sub(r"\W", "_", word))
    if not words:
        return "custom_copy"
    if len(words) > MAX_NAME_WORDS:
        words = [*words[: MAX_NAME_WORDS - 2], "to", words[-1]]
    return "custom_" + "_".join(words)
