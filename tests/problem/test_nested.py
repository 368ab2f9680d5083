"""Trees of arguments: their leaves by name and without."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

from fusewright.problem.nested import leaves, values

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Batch:
    x: int
    rest: tuple[Any, ...] = (5, [6])


def test_values_are_the_leaves_in_the_same_order() -> None:
    trees: list[object] = [
        1,
        [2, (3, {"a": 4, "b": [Batch(0)]})],
        Batch,
        "text",
        None,
        Pair(7, {"c": 8}),
        OrderedDict(d=9),
        UserDict(e=[10]),
        [],
        {},
    ]
    assert values(trees) == [each for _, each in leaves("", trees)]
    assert values(trees)[:5] == [1, 2, 3, 4, 0]
    assert values([Batch(1), Batch(2)]) == [1, 5, 6, 2, 5, 6]
