"""Schedules worth measuring for one kernel: the heuristic's first, then variations of it.

All of them are legal. They are few, because each one is compiled.
"""

from __future__ import annotations

from fusewright.ir.graph import Sizes
from fusewright.ir.kernel import Kernel
from fusewright.kinds.kind import Choice
from fusewright.kinds.registry import heuristic, kind_of, permitted
from fusewright.target.target import Target

MOST = 12


def worth_trying(kernel: Kernel, target: Target, sizes: Sizes) -> tuple[Choice, ...]:
    """At most MOST legal choices, the heuristic's first."""
    first = heuristic(kernel, target, sizes)
    others = kind_of(kernel).variations(kernel, first, target, sizes)
    wanted = dict.fromkeys((first, *others))
    return tuple(each for each in wanted if permitted(kernel, each, target))[:MOST]
