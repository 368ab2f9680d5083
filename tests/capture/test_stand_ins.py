"""Stand-ins accept one kind of change, and no look at the value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusewright.capture.stand_ins import Appended, Count, Filled, Used


def test_what_was_added_is_known() -> None:
    count = Count()
    count += 2
    count = 3 + count - 1
    assert count.added == 4
    listed = Appended()
    listed.append("a")
    listed += ["b"]
    listed.extend("c")
    assert listed.added == ["a", "b", "c"]
    filled = Filled()
    filled["a"] = 1
    filled.update(b=2)
    assert filled.added == {"a": 1, "b": 2}


LOOKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "count == 0": lambda c, a, f: c == 0,
    "count % 2": lambda c, a, f: c % 2,
    "1 / count": lambda c, a, f: 1 / c,
    "range(count)": lambda c, a, f: range(c),
    "f-string": lambda c, a, f: f"{c}",
    "max": lambda c, a, f: max(c, 3),
    "if count": lambda c, a, f: 1 if c else 2,
    "count + 0.5": lambda c, a, f: c + 0.5,
    "tensor + count": lambda c, a, f: torch.ones(2) + c,
    "count * tensor": lambda c, a, f: c * torch.ones(2),
    "torch.full": lambda c, a, f: torch.full((2,), c),
    "len(list)": lambda c, a, f: len(a),
    "list[-1]": lambda c, a, f: a[-1],
    "for": lambda c, a, f: next(each for each in a),
    "unpacked": lambda c, a, f: [*a],
    "torch.stack": lambda c, a, f: torch.stack(a),
    "if list": lambda c, a, f: 1 if a else 2,
    "list.pop": lambda c, a, f: a.pop(),
    "list == list": lambda c, a, f: a == [],
    "copied": lambda c, a, f: copy.copy(a),
    "dict[key]": lambda c, a, f: f["a"],
    "dict.get": lambda c, a, f: f.get("a"),
    "key in dict": lambda c, a, f: "a" in f,
    "dict(dict)": lambda c, a, f: dict(f),
    "**dict": lambda c, a, f: {**f},
    "dict.items": lambda c, a, f: f.items(),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_the_value_raises(name: str) -> None:
    listed, filled = Appended(), Filled()
    listed.append(torch.ones(2))
    filled["a"] = 1
    with pytest.raises((Used, TypeError)):
        LOOKS[name](Count(), listed, filled)
