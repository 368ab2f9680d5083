"""Values that several kernels compute for themselves, and that are better computed once.

Storing a value saves the reads of everything that a kernel reads for this value alone. It costs one
write, and one read for each kernel but the one that computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from fusewright.plan.frames import ElementIndex, NotFusibleError, access
from fusewright.plan.merge import Group
from fusewright.plan.values import Values, is_pointwise


def worth_storing(values: Values, groups: Sequence[Group]) -> frozenset[str]:
    """Values that several groups compute, if storing them once would save more bytes of reads."""
    holders: dict[str, list[_Reads]] = {}
    for reads in (_Reads(values, group) for group in groups):
        for name in reads.group.assembled.inlined:
            holders.setdefault(name, []).append(reads)
    found = set()
    for name, sharing in holders.items():
        if len(sharing) < 2 or not _could_be_stored(values, name):
            continue
        saved = sorted(reads.saved_by(name) for reads in sharing)
        # The group that gains least from the stored value computes and stores it.
        if sum(saved[1:]) > values.bytes_of(name):
            found.add(name)
    return frozenset(found)


def _could_be_stored(values: Values, name: str) -> bool:
    node = values.nodes.get(name)
    if node is None or not is_pointwise(node) or not node.refs():
        return False
    return name not in values.realised and len(values.users[name]) > 1


class _Reads:
    """What a group reads, and for which of its values."""

    def __init__(self, values: Values, group: Group) -> None:
        self.values = values
        self.group = group

    def saved_by(self, name: str) -> int:
        """How many bytes less the group reads if a value is in memory; 0 if it cannot read it."""
        values = self.values
        try:
            for index in self._indices[name]:
                access(name, values.spec(name), index, self.group.assembled.domain.sizes)
        except NotFusibleError:
            return 0
        return self._bytes_for[name] - values.bytes_of(name)

    @cached_property
    def _indices(self) -> dict[str, list[ElementIndex]]:
        found: dict[str, list[ElementIndex]] = {}
        for name, index in self.group.assembled.reads:
            found.setdefault(name, []).append(index)
        return found

    @cached_property
    def _bytes_for(self) -> dict[str, int]:
        """For each value, the bytes of the tensors that are read for it alone.

        These are the tensors that it dominates: every path from the group's items to them leads
        through it. A value comes after all its readers in `reads`, so one pass finds for each value
        the last one through which all its paths lead.
        """
        over = dict.fromkeys(self.group.items, "")
        depth = {"": 0}
        for (name, _), operands in self.group.assembled.reads.items():
            depth[name] = depth[over[name]] + 1
            for operand, _ in operands:
                over[operand] = (
                    _meeting(over, depth, over[operand], name) if operand in over else name
                )
        total = dict.fromkeys(("", *over), 0)
        total.update((name, self.values.bytes_of(name)) for name in self.group.assembled.loads)
        loaded = set(self.group.assembled.loads)
        for name in sorted(over, key=lambda each: -depth.get(each, len(over) + 1)):
            total[over[name]] += total[name]
        return {name: total[name] for name in over if name not in loaded}


def _meeting(over: dict[str, str], depth: dict[str, int], one: str, other: str) -> str:
    """The last value above two others."""
    while one != other:
        if depth[one] < depth[other]:
            one, other = other, one
        one = over[one]
    return one
