"""Long lines are broken where Python allows it, and fill their columns."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright.emit.wrap import COLUMNS, OFF, ON, wrapped

LONG = [f"a_long_name_{at}" for at in range(12)]
LINES = (
    f"{', '.join(LONG)} = f(x, y)",
    f"{', '.join(LONG[:5])} = custom_function({', '.join(LONG)})",
    f"{', '.join(LONG)} = custom_function({', '.join(LONG)})",
    f"[{', '.join(LONG)}] = _fw_taken(values, _model_saved(*sizes), device)",
    f"del {', '.join(LONG)}",
    f"x = ({', '.join(LONG)})",
    f"x = f({', '.join(LONG[:6])})",
    f"x = f({', '.join(LONG)})",
    f"x = f(({', '.join(LONG)}), {LONG[0]}=[{', '.join(LONG)}])",
    f"x = f(g(h({', '.join(LONG)})))",
    f"x = (({', '.join(LONG)}),)",
    f'x = {{"a, b": ({", ".join(LONG)}), "c (": 1}}',
    f"need_1 = {' or '.join(LONG)}",
    f"x = f(a, {LONG[0]}={' + '.join(LONG[:3])} if {' + '.join(LONG[:3])} else {LONG[9]})",
    "x = f(64*s0 + 3*s1//2, *more, **others)",
    f"x = _fw_memory((123 * -(-s0 // 128) + ({' + '.join(LONG[:4])} if s0 >= 2 else 0),), (1,), d)",
    f"x = f({' + '.join(LONG)})",
)
FUNCTION = (
    f"def f({', '.join(LONG)}):",
    f"    return ({', '.join(LONG)})",
    "",
    "",
    f"def g({', '.join(LONG[:6])}):",
    f"    return {', '.join(LONG)}",
)


def meaning(text: str) -> str:
    """The syntax tree. To delete a tuple is to delete its items."""
    return re.sub(
        r"targets=\[Tuple\(elts=(\[.*\]), ctx=Del\(\)\)\]", r"targets=\1", ast.dump(ast.parse(text))
    )


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("line", LINES)
def test_lines_are_filled(line: str, depth: int) -> None:
    blocks = [f"{'    ' * at}if x:" for at in range(depth)]
    before = [*blocks, "    " * depth + line]
    after = wrapped(before)
    assert meaning("\n".join(after)) == meaning("\n".join(before))
    assert max(map(len, after)) <= COLUMNS
    assert len(after) - depth <= 2 + len(line) // 70


def test_the_head_of_a_function_stands_out_from_its_body() -> None:
    lines = wrapped(FUNCTION)
    assert meaning("\n".join(lines)) == meaning("\n".join(FUNCTION))
    assert max(map(len, lines)) <= COLUMNS
    assert lines[1].startswith(" " * 8 + "a_long_name_")


def test_ruff_leaves_the_lines_alone() -> None:
    text = "\n".join([OFF, *wrapped((*LINES, *FUNCTION)), ON]) + "\n"
    command = [sys.executable, "-m", "ruff", "format", "--line-length", str(COLUMNS), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert done.stdout == text


def test_strings_and_comments_stay() -> None:
    lines = [f'"{"a, " * 60}"', f"# {'(a, b) ' * 30}", 'x = "64*s0"']
    lines.append(f'x = "{"y " * 50} if a else b"')
    assert wrapped(lines) == lines


NAMES = st.sampled_from(["s0", "a_name", "another_much_longer_name", "8658944"])


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=4)
    return st.one_of(
        st.tuples(inner, inner).map(lambda two: f"{two[0]} + ({two[1]})"),
        st.tuples(inner, inner).map(lambda two: f"({two[0]})*-(-{two[1]}//128)"),
        st.tuples(inner, inner).map(lambda two: f"({two[0]} if {two[1]} >= 2352 else 0)"),
        several.map(lambda items: f"a_function({', '.join(items)})"),
        several.map(lambda items: f"({', '.join(items)},)"),
        several.map(lambda items: f"[{', '.join(items)}]"),
        several.map(lambda items: f"({' or '.join(items)})"),
    )


@settings(max_examples=300, deadline=None)
@given(
    value=st.recursive(NAMES, _larger, max_leaves=16), start=st.sampled_from(["x = ", "return "])
)
def test_broken_lines_mean_the_same(value: str, start: str) -> None:
    before = f"{start}{value}"
    after = "\n".join(wrapped([before]))
    assert meaning(after) == meaning(before)
