"""Precision classes: a result's error beside the errors that narrower matmuls would make.

The limits are measured. The model runs in float64 once as it is (the truth) and once for each class
with the operands of its matmuls rounded to the class's digits. TF32 and fp16 have the same digits,
so errors cannot tell them apart; both are called tf32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# From the finest to the coarsest. A candidate's class is the coarsest of its results.
PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16")
# Orders of summation, split matmuls and Winograd's transforms differ by this much in fp32.
_OF_EAGER = 8.0
_ULPS = 4
# Tensor cores truncate TF32 operands, the emulation rounds them: twice the error.
_SLACK = 3.0
_OWN_PEAK_SLACK, _PEAK_SLACK = 16.0, 4.0
# Below this limit the precision of matmuls does not show in a result.
_VISIBLE_ULPS = 100


@dataclass(frozen=True)
class Deviation:
    """A relative error, the largest deviation of a single element, and the share of elements whose
    deviation is more than rounding."""

    error: float
    largest: float
    spread: float = 0.0


def class_limits(
    own: str, ulp: float, rounding: float, strict: Deviation, narrow: Mapping[str, Deviation]
) -> dict[str, Deviation]:
    """The largest deviation that each class accepts.

    `rounding` is a few units in the last place of the largest element. `strict` is how far eager
    is off without TF32, `narrow` how far matmuls with fewer digits are off.
    """
    limit = Deviation(
        _ULPS * ulp + _OF_EAGER * strict.error, _OWN_PEAK_SLACK * (rounding + strict.largest)
    )
    limits = {own: limit}
    if own != "fp32":
        return limits
    for kind, found in narrow.items():
        if math.isfinite(found.error):  # a narrow run that overflows sets no limit
            limits[kind] = Deviation(_SLACK * found.error, _PEAK_SLACK * found.largest)
    visible = limits["tf32"].error if "tf32" in limits else 0.0
    if visible > _VISIBLE_ULPS * ulp and limit.error > visible:
        # The model lowers its own precision: eager is no measure of fp32.
        del limits[own]
        limits["tf32"] = Deviation(limit.error, max(limit.largest, limits["tf32"].largest))
    return limits


def coarsest(classes: Sequence[str]) -> str:
    """The class of a candidate; empty if it has no result or a wrong one."""
    return max(classes, key=PRECISIONS.index) if classes and all(classes) else ""


def coarseness(precision: str) -> int:
    """A class's rank; a wrong result ("") is the coarsest."""
    return PRECISIONS.index(precision) if precision in PRECISIONS else len(PRECISIONS)
