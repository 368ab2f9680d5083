"""Shorter text that computes the same."""

from __future__ import annotations

import pytest

from fusewright.codegen.text import size_in_doubles
from fusewright.codegen.tidy import without_aliases
from fusewright.ir.graph import Ratio


def test_indices_of_the_type_int_are_widened_before_they_are_multiplied() -> None:
    lines = ["const I i0 = image;", "const I j0 = l;", "x.read(a0 + (i0 * 2032128 + j0));"]
    assert without_aliases(lines) == [lines[0], "x.read(a0 + (i0 * 2032128 + l));"]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("(1.0 * 784 * s0)", "784.0 * double(s0)"),
        ("3 / (1.0 * s0) * 2", "3.0 / double(s0) * 2.0"),
        ("s0 / 1.0 * s0", "double(s0) / 1.0 * double(s0)"),
        ("1.0 * 1 / 2", "1.0 / 2.0"),
        ("(1 + s0) * (s0 - 1.0 * 2)", "(1.0 + double(s0)) * (double(s0) - 2.0)"),
    ],
)
def test_sizes_in_doubles_are_plain(text: str, plain: str) -> None:
    assert size_in_doubles(Ratio(text), {"s0": "s0"}) == plain
