"""Which values share a kernel: every item starts alone, then groups merge while that is legal.

A merge saves memory traffic, so any legal one is taken: producers into consumers first, then groups
that read the same tensors (see `merge` and `merge_order`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fusewright.plan.dependencies import Items
from fusewright.plan.domain import Domain, point_domain, reduction_domain, scan_domain
from fusewright.plan.frames import NotFusibleError
from fusewright.plan.merge import Group, group_of
from fusewright.plan.merge_order import merge_all
from fusewright.plan.overlaps import read_often
from fusewright.plan.values import Values, is_pointwise, is_scan, is_view
from fusewright.plan.worth_storing import worth_storing

MAX_ROUNDS = 8


def fuse(values: Values) -> tuple[Values, tuple[Group, ...]]:
    """The groups of a graph, and `values` with the decision what is in memory."""
    wanted = _must_be_stored(values) | _row_results(values) | frozenset(values.ends)
    values = replace(values, realised=wanted)
    values = replace(values, realised=wanted | read_often(values))
    singles = _Singles(values)
    for _ in range(MAX_ROUNDS):
        alone = singles.groups()
        values = singles.values
        groups = merge_all(values, alone)
        shared = worth_storing(values, groups)
        if not shared:
            break
        singles.store(shared)
    return singles.values, tuple(groups)


# Values in memory -------------------------------------------------------------------------------


def memory_readers(values: Values) -> Iterator[str]:
    """Values that PyTorch reads: graph outputs, operands of calls, sources of memory views."""
    yield from (name for name in values.graph.outputs if isinstance(name, str))
    for node in values.graph.nodes:
        if not values.is_item(node.name) and not (
            is_view(node) and node.name not in values.memory_views
        ):
            yield from node.refs()


def needed_views(values: Values) -> frozenset[str]:
    """Canonical views that PyTorch must take, with the views beneath them."""
    found: set[str] = set()
    for name in memory_readers(values):
        while name in values.nodes and is_view(values.nodes[name]):
            found.add(name)
            name = values.nodes[name].refs()[0]
    return frozenset(found) | values.memory_views


def _must_be_stored(values: Values) -> frozenset[str]:
    found: set[str] = set()
    for name in memory_readers(values):
        while name in values.nodes and is_view(values.nodes[name]):
            name = values.nodes[name].refs()[0]
        if values.is_item(name):
            found.add(name)
    own = (n for n in values.graph.nodes if is_scan(n) or values.reduction_of(n.name) is not None)
    picked = (node.name for node in own if node.op != "reduce_welford")
    return frozenset(found) | frozenset(picked)


def _row_results(values: Values) -> frozenset[str]:
    """Small results of reductions that larger values read: computed once, not for every element."""
    after: set[str] = set()
    found: set[str] = set()
    for node in values.graph.nodes:
        sources = [name for name in node.refs() if name in values.nodes]
        follows = any(name in after for name in sources)
        if values.reduction_of(node.name) is not None or (
            follows and (is_pointwise(node) or is_view(node))
        ):
            after.add(node.name)
        if node.spec is None or not is_pointwise(node):
            continue
        for name in sources:
            base = _through_views(values, name)
            small = values.bytes_of(base) * 4 <= values.bytes_of(node.name)
            if small and base in after and is_pointwise(values.nodes[base]):
                found.add(base)
    return frozenset(found)


def _through_views(values: Values, name: str) -> str:
    while name in values.nodes and is_view(values.nodes[name]):
        name = values.nodes[name].refs()[0]
    return name


# Groups --------------------------------------------------------------------------------------


class _Singles:
    """One group per unit, while more values go to memory. Only groups in which that changes
    something are built again."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self._groups: dict[Items, Group] = {}
        self._holders: dict[str, list[Items]] = {}  # the units that a value is part of
        self._open = [(values.order[unit[0]], unit) for unit in _units(values)]
        heapq.heapify(self._open)

    def groups(self) -> list[Group]:
        """The groups in the order of the graph. Views that index arithmetic cannot follow go to
        memory on the way."""
        while self._open:
            _, unit = self._open[0]
            try:
                made = group_of(self.values, unit, _domain(self.values, unit[0]))
            except NotFusibleError as reason:
                if reason.culprit is None:
                    raise
                self._take_view(reason.culprit)
                continue
            heapq.heappop(self._open)
            self._groups[unit] = made
            for name in made.assembled.inlined:
                self._holders.setdefault(name, []).append(unit)
        found = self._groups.values()
        return sorted(found, key=lambda group: self.values.order[group.items[0]])

    def store(self, names: Iterable[str]) -> None:
        """These values are in memory from now on."""
        new = frozenset(names) - self.values.realised
        self.values = replace(self.values, realised=self.values.realised | new)
        for name in new:
            heapq.heappush(self._open, (self.values.order[name], (name,)))
            self._build_again(name)

    def _take_view(self, name: str) -> None:
        """PyTorch takes this view, so its source must be in memory."""
        views = self.values.memory_views | {name}
        self.values = replace(self.values, memory_views=views)
        source = _through_views(self.values, name)
        self._build_again(name)
        self.store([source] if self.values.is_item(source) else [])

    def _build_again(self, name: str) -> None:
        for unit in self._holders.pop(name, ()):
            if self._groups.pop(unit, None) is not None:
                heapq.heappush(self._open, (self.values.order[unit[0]], unit))


def _units(values: Values) -> Iterator[Items]:
    """Items that cannot be separated: the results of one welford reduction, or a single value."""
    together: dict[str, list[str]] = {}
    for name in sorted(values.realised, key=values.order.__getitem__):
        reduction = values.reduction_of(name)
        joint = reduction is not None and reduction.op == "reduce_welford"
        together.setdefault(reduction.name if reduction and joint else name, []).append(name)
    yield from map(tuple, together.values())


def _domain(values: Values, item: str) -> Domain:
    reduction = values.reduction_of(item)
    if reduction is not None:
        return reduction_domain(values, reduction)
    if is_scan(values.nodes[item]):
        return scan_domain(values, values.nodes[item])
    return point_domain(values.spec(item).shape)
