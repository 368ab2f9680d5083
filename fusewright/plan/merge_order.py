"""Which groups merge with which: pairs are tried in a fixed order until no merge is left.

Producers and consumers are tried first, in the order of the consumers; then readers of the same
tensor, in the order in which the tensors are first read; last, small groups that wait for the same
ones, because each kernel costs a launch. After each merge the order starts again.
But only pairs with a new group can have another result than before, so only these are tried again:
the work is proportional to the pairs, not to their number times the merges.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from fusewright.plan.dependencies import Dependencies
from fusewright.plan.domain import Domain
from fusewright.plan.merge import (
    Group,
    common_domain,
    merged,
    reads_in_one_order,
    reads_once_more,
)
from fusewright.plan.values import Values

Rank = int | Fraction
# A loop that moves less takes no longer than its launch (H200: 2 to 4 µs, and as much of the host).
LAUNCH_BYTES = 1 << 20
MOST_TOGETHER = 32  # results of small groups in one kernel


@dataclass(eq=False)
class _Place:
    """A group and its place in the order. `number` counts groups as they are made."""

    group: Group
    rank: Rank
    number: int
    largest: int  # bytes of the largest tensor that it reads

    @property
    def loads(self) -> tuple[str, ...]:
        return self.group.assembled.loads


def _rank(place: _Place) -> Rank:
    return place.rank


def merge_all(values: Values, groups: Iterable[Group]) -> list[Group]:
    """The groups that are left once no two of them can merge."""
    order = _MergeOrder(values, list(groups))
    while (pair := order.first_pair()) is not None:
        order.replace(*pair)
    return [place.group for place in order.places]


class _MergeOrder:
    def __init__(self, values: Values, groups: list[Group]) -> None:
        self.values = values
        self.dependencies = Dependencies(values, [group.items for group in groups])
        self.places: list[_Place] = []
        self._count = 0
        self._home: dict[str, _Place] = {}
        self._readers: dict[str, list[_Place]] = {}
        self._similar: dict[str, list[_Place]] = {}  # readers without much larger tensors
        self._consumers: list[tuple[Rank, int, _Place]] = []  # a heap
        self._waiting: set[int] = set()  # the numbers of these
        self._tensors: list[tuple[Rank, int, str]] = []  # a heap
        self._untried: set[str] = set()  # tensors
        self._gone: set[int] = set()
        self._refused: set[tuple[int, int, str]] = set()
        self._cyclic: set[tuple[int, int]] = set()
        self._trials: dict[tuple[int, int, Domain], Group | None] = {}
        # For each tensor: the readers that were tried with all groups up to this number.
        self._tried: dict[str, dict[int, int]] = {}
        for rank, group in enumerate(groups):
            self._add(group, rank)
        for place in self.places:
            self._try_consumer(place)

    # Pairs in their order --------------------------------------------------------------------

    def first_pair(self) -> tuple[_Place, _Place, Group] | None:
        """The first two groups that can merge, and what they become."""
        while self._consumers:
            _, _, consumer = heapq.heappop(self._consumers)
            self._waiting.discard(consumer.number)
            if consumer.number not in self._gone:
                for pair in self._with_producers(consumer):
                    return pair
        while self._tensors:
            rank, at, name = heapq.heappop(self._tensors)
            if name in self._untried and (rank, at) == self._first_read(name):
                for pair in self._with_readers(name):
                    return pair
                self._untried.discard(name)
        return next(self._with_launches(), None)

    def _with_producers(self, consumer: _Place) -> Iterator[tuple[_Place, _Place, Group]]:
        for name in consumer.loads:
            producer = self._home.get(name)
            if producer is not None and producer is not consumer:
                both = self._merge(producer, consumer, "")
                if both is not None:
                    yield producer, consumer, both

    def _with_readers(self, name: str) -> Iterator[tuple[_Place, _Place, Group]]:
        readers = self._similar[name]
        tried = self._tried.setdefault(name, {})
        newest = max((each.number for each in readers), default=-1)
        for at, first in enumerate(readers):
            before = tried.get(first.number, -1)
            for second in readers[at + 1 :] if before < newest else ():
                if second.number > before:
                    both = self._merge(first, second, name)
                    if both is not None:
                        yield first, second, both
            tried[first.number] = self._count - 1

    def _with_launches(self) -> Iterator[tuple[_Place, _Place, Group]]:
        """Small groups over the same axes that read results of the same groups and calls."""
        alike: dict[tuple[Domain, frozenset[str]], list[_Place]] = {}
        for place in self.places:
            if self._is_small(place):
                alike.setdefault((place.group.assembled.domain, self._awaited(place)), []).append(
                    place
                )
        for places in alike.values():
            for first, second in itertools.pairwise(places):
                few = len(first.group.items) + len(second.group.items) <= MOST_TOGETHER
                both = self._merge(first, second, "") if few else None
                if both is not None and reads_in_one_order(both):
                    yield first, second, both

    def _is_small(self, place: _Place) -> bool:
        """Whether a group is a loop of its own that moves little."""
        items = place.group.items
        moved = sum(map(self.values.bytes_of, (*place.loads, *items)))
        return moved <= LAUNCH_BYTES and self.values.ends.keys().isdisjoint(items)

    def _awaited(self, place: _Place) -> frozenset[str]:
        """The groups, by their first value, and the results of calls that a group reads."""
        homes = ((name, self._home.get(name)) for name in place.loads)
        return frozenset(
            name if home is None else home.group.items[0]
            for name, home in homes
            if name not in self.values.inputs
        )

    def _merge(self, first: _Place, second: _Place, shared: str) -> Group | None:
        """Two groups as one; the tensor that they share must be read in one way."""
        key = (first.number, second.number, shared)
        if key in self._refused:
            return None
        both = self._legal(first, second)
        if both is None or (shared and reads_once_more(both, first.group, second.group, shared)):
            self._refused.add(key)
            return None
        return both

    def _legal(self, first: _Place, second: _Place) -> Group | None:
        domain = common_domain(first.group, second.group)
        pair = min(first.number, second.number), max(first.number, second.number)
        if domain is None or self._makes_cycle(pair, first, second):
            return None
        key = (*pair, domain)
        if key not in self._trials:
            self._trials[key] = merged(self.values, first.group, second.group, domain)
        return self._trials[key]

    def _makes_cycle(self, pair: tuple[int, int], first: _Place, second: _Place) -> bool:
        """A cycle stays one, whatever else merges."""
        if pair not in self._cyclic:
            names = first.group.items[0], second.group.items[0]
            if not self.dependencies.makes_cycle(*names):
                return False
            self._cyclic.add(pair)
        return True

    # Changes ---------------------------------------------------------------------------------

    def replace(self, first: _Place, second: _Place, both: Group) -> None:
        """Put the merged group into the place of the first one."""
        self.dependencies.join(first.group.items[0], second.group.items[0])
        for place in (first, second):
            self._remove(place)
        new = self._add(both, self._rank_of_both(first, second))
        self._try_consumer(new)
        for item in both.items:
            for reader in self._readers.get(item, ()):
                self._try_consumer(reader)
        for name in dict.fromkeys((*first.loads, *second.loads)):
            self._try_tensor(name)

    def _rank_of_both(self, first: _Place, second: _Place) -> Rank:
        """The first one's place. If the second one came before it, the groups in between moved up,
        and the next one is passed."""
        if first.rank < second.rank:
            return first.rank
        at = bisect.bisect_left(self.places, first.rank, key=_rank)
        later = [place.rank for place in self.places[at : at + 2]]
        if len(later) < 2:
            return later[0] + 1 if later else first.rank
        return Fraction(later[0] + later[1]) / 2

    def _add(self, group: Group, rank: Rank) -> _Place:
        largest = max(map(self.values.bytes_of, group.assembled.loads), default=0)
        place = _Place(group, rank, self._count, largest)
        self._count += 1
        bisect.insort(self.places, place, key=_rank)
        self._home.update(dict.fromkeys(group.items, place))
        for name in place.loads:
            bisect.insort(self._readers.setdefault(name, []), place, key=_rank)
            if self.values.bytes_of(name) * 2 >= largest:
                bisect.insort(self._similar.setdefault(name, []), place, key=_rank)
                self._untried.add(name)
            self._try_tensor(name)
        return place

    def _remove(self, place: _Place) -> None:
        self._gone.add(place.number)
        _take(self.places, place)
        for name in place.loads:
            _take(self._readers[name], place)
            if self.values.bytes_of(name) * 2 >= place.largest:
                _take(self._similar[name], place)

    def _try_consumer(self, place: _Place) -> None:
        if place.number not in self._waiting:
            self._waiting.add(place.number)
            heapq.heappush(self._consumers, (place.rank, place.number, place))

    def _try_tensor(self, name: str) -> None:
        if name in self._untried and len(self._similar[name]) > 1:
            heapq.heappush(self._tensors, (*self._first_read(name), name))

    def _first_read(self, name: str) -> tuple[Rank, int]:
        """Where a tensor is read first: the group's place, and the position among its loads."""
        readers = self._readers[name]
        return (readers[0].rank, readers[0].loads.index(name)) if readers else (-1, -1)


def _take(places: list[_Place], place: _Place) -> None:
    del places[bisect.bisect_left(places, place.rank, key=_rank)]
