"""Which units of work wait for which, while units are joined one by one.

A unit is a set of values that are computed together, or one PyTorch call. Two units may become one
unless a path leads out of the pair, through another unit, and back in. The units are kept in an
order in which they could run. So a search for such a path stays between the two units of a pair,
and a join moves only units that lie between them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from fusewright.ir.graph import Node
from fusewright.plan.values import Values, is_pointwise, is_view

Items = tuple[str, ...]
GAP = 1 << 32  # between the ranks of neighbours at first


@dataclass
class _Search:
    """What is known of the units that can be reached from one unit.

    `seen` are all of them up to the rank that was asked for, `beyond` those that another unit leads
    to. `frontier` is a heap of seen units, by rank, whose followers are not known yet.
    """

    start: int
    seen: set[int]
    frontier: list[tuple[int, int]]
    beyond: set[int] = field(default_factory=set)


class Dependencies:
    """The units of a graph. A unit is named by any of its values, or by the name of a call."""

    def __init__(self, values: Values, units: Iterable[Items]) -> None:
        self._unit: dict[str, int] = {}
        count = 0
        for items in units:
            self._unit.update(dict.fromkeys(items, count))
            count += 1
        for node in values.graph.nodes:
            if node.name not in self._unit and not _is_transparent(values, node):
                self._unit[node.name] = count
                count += 1
        self._joined = list(range(count))
        self._after = self._followers(values, count)
        self._before: list[set[int]] = [set() for _ in range(count)]
        for unit, found in enumerate(self._after):
            found.discard(unit)
            for each in found:
                self._before[each].add(unit)
        self._search: _Search | None = None
        self._order(values)

    def makes_cycle(self, first: str, second: str) -> bool:
        """Whether a path leads out of the pair, through another unit, and back in."""
        early, late = self._pair(first, second)
        return late in self._reached(early, late).beyond

    def join(self, first: str, second: str) -> None:
        """Make one unit of two. They must not make a cycle."""
        early, late = self._pair(first, second)
        between = [unit for unit in self._reached(early, late).seen if self._is_before(unit, late)]
        # What follows the earlier unit must now follow the later one.
        self._move(sorted(between, key=self._rank.__getitem__), late)
        self._unlink(early)
        self._joined[early] = late
        self._pass_on(self._after, self._before, early, late)
        self._pass_on(self._before, self._after, early, late)
        self._search = None

    @staticmethod
    def _pass_on(edges: list[set[int]], back: list[set[int]], old: int, new: int) -> None:
        """Give one unit's neighbours in one direction to another one."""
        for each in edges[old]:
            back[each].discard(old)
            if each != new:
                back[each].add(new)
                edges[new].add(each)
        edges[old] = set()

    # Reachability ----------------------------------------------------------------------------

    def _pair(self, first: str, second: str) -> tuple[int, int]:
        one, other = self._now(self._unit[first]), self._now(self._unit[second])
        return (one, other) if self._rank[one] < self._rank[other] else (other, one)

    def _now(self, unit: int) -> int:
        """The unit that this one is part of by now."""
        joined = self._joined
        while joined[unit] != unit:
            joined[unit] = joined[joined[unit]]
            unit = joined[unit]
        return unit

    def _is_before(self, unit: int, other: int) -> bool:
        return self._rank[unit] < self._rank[other]

    def _reached(self, start: int, end: int) -> _Search:
        """The search from `start`, as far as the rank of `end`. Pairs with one unit in common are
        asked for one after another, so a search is kept and continued."""
        search = self._search
        if search is None or search.start != start:
            direct = self._after[start]
            search = _Search(start, set(direct), [(self._rank[each], each) for each in direct])
            heapq.heapify(search.frontier)
            self._search = search
        limit = self._rank[end]
        while search.frontier and search.frontier[0][0] < limit:
            _, unit = heapq.heappop(search.frontier)
            after = self._after[unit]
            search.beyond |= after
            for each in after - search.seen:
                heapq.heappush(search.frontier, (self._rank[each], each))
            search.seen |= after
        return search

    # Order -----------------------------------------------------------------------------------

    def _order(self, values: Values) -> None:
        """Rank the units so that each comes after those it waits for, early nodes first."""
        first: dict[int, int] = {}
        for name, unit in self._unit.items():
            first[unit] = min(first.get(unit, values.order[name]), values.order[name])
        waiting = list(map(len, self._before))
        ready = [(first[unit], unit) for unit, count in enumerate(waiting) if count == 0]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            _, unit = heapq.heappop(ready)
            order.append(unit)
            for each in self._after[unit]:
                waiting[each] -= 1
                if waiting[each] == 0:
                    heapq.heappush(ready, (first[each], each))
        assert len(order) == len(self._after), "the units wait for each other"
        self._rank = [0] * len(order)
        # A ring of the units in their order; its last place is both its start and its end.
        ring = [*order, len(order)]
        self._later, self._earlier = [0] * len(ring), [0] * len(ring)
        for unit, later in zip(ring, (*ring[1:], ring[0]), strict=True):
            self._later[unit], self._earlier[later] = later, unit
        self._renumber()

    def _renumber(self) -> None:
        end = len(self._rank)
        unit, rank = self._later[end], GAP
        while unit != end:
            self._rank[unit] = rank
            unit, rank = self._later[unit], rank + GAP

    def _unlink(self, unit: int) -> None:
        earlier, later = self._earlier[unit], self._later[unit]
        self._later[earlier], self._earlier[later] = later, earlier

    def _move(self, units: list[int], after: int) -> None:
        """Put units right after another one."""
        for unit in units:
            self._unlink(unit)
        later, end = self._later[after], len(self._rank)
        room = GAP if later == end else self._rank[later] - self._rank[after]
        rank, step = self._rank[after], room // (len(units) + 1)
        for unit in units:
            self._later[after], self._earlier[unit] = unit, after
            self._later[unit], self._earlier[later] = later, unit
            after, rank = unit, rank + step
            self._rank[unit] = rank
        if units and step == 0:
            self._renumber()

    def _followers(self, values: Values, count: int) -> list[set[int]]:
        """For each unit, those that read its values. Nodes that are part of the loop that reads
        them are passed through."""
        through: dict[str, set[int]] = {}
        found: list[set[int]] = [set() for _ in range(count)]
        for node in reversed(values.graph.nodes):
            unit = self._unit.get(node.name)
            into = through.setdefault(node.name, set()) if unit is None else found[unit]
            for user in values.followers(node.name):
                next_unit = self._unit.get(user.name)
                if next_unit is None:
                    into |= through[user.name]
                else:
                    into.add(next_unit)
        return found


def _is_transparent(values: Values, node: Node) -> bool:
    """Whether a node is part of the loop that reads it, rather than a step of its own."""
    followed = is_view(node) and node.name not in values.memory_views
    return followed or is_pointwise(node) or node.op == "reduce_welford"
