"""The run time's text without branches that no mode of a file takes."""

from __future__ import annotations

import pytest

from fusewright.emit.specialised import TRUE, specialised

FACTS: dict[str, object] = {"none": None, "off": False, "on": True, "empty": (), "set": TRUE}
CASES = {
    "a branch that is not taken": (
        "if mode.off:\n    a = 1\nb = 2\n",
        "b = 2\n",
    ),
    "a branch that is taken": (
        "if mode.none is None:\n    a = 1\nelse:\n    a = 2\nb = 2\n",
        "a = 1\nb = 2\n",
    ),
    "the other branch": (
        "if mode.set is None:\n    a = 1\nelse:\n    if b:\n        a = 2\n",
        "if b:\n    a = 2\n",
    ),
    "an elif goes": (
        "if x:\n    a = 1\nelif mode.empty:\n    a = 2\nelif y:\n    a = 3\nelse:\n    a = 4\n",
        "if x:\n    a = 1\nelif y:\n    a = 3\nelse:\n    a = 4\n",
    ),
    "an elif becomes the first": (
        "if mode.off:\n    a = 1\nelif y:\n    a = 2\n",
        "if y:\n    a = 2\n",
    ),
    "an elif that holds is the last": (
        "if x:\n    a = 1\nelif mode.on:\n    a = 2\nelse:\n    a = 3\n",
        "if x:\n    a = 1\nelse:\n    a = 2\n",
    ),
    "an operand decides": (
        "if x and mode.none is not None:\n    a = 1\nb = 2\n",
        "b = 2\n",
    ),
    "operands that decide nothing": (
        "if mode.on and (x or mode.off) and (y) and mode.set:\n    a = 1\n",
        "if (x) and (y):\n    a = 1\n",
    ),
    "in several lines": (
        "if (\n    mode.off\n    or x\n    or not mode.on\n):\n    a = 1\n",
        "if (x):\n    a = 1\n",
    ),
    "the value of a choice": ("a = f(1 if mode.on else 2, x)\n", "a = f(1, x)\n"),
    "a loop over nothing": ("for each in mode.empty:\n    f(each)\nb = 2\n", "b = 2\n"),
    "an assertion": ("assert mode.set is not None\nb = 2\n", "b = 2\n"),
    "a suite is not emptied": (
        "def f(mode):\n    for each in mode.empty:\n        g(each)\n",
        "def f(mode):\n    for each in mode.empty:\n        g(each)\n",
    ),
    "nothing is known": (
        "if mode.other and self.off:\n    a = mode.on\n",
        "if mode.other and self.off:\n    a = mode.on\n",
    ),
    "a short try stays on its lines": (
        "if mode.on:\n    a = 1\ntry:\n    b()\nexcept E:\n    c()\n",
        "a = 1\ntry:\n    b()\nexcept E:\n    c()\n",
    ),
    "a statement that fits on one line now": (
        "if mode.on:\n    a = f(\n        b, c\n    )\n    d = [\n        1,\n    ]\n",
        "a = f(b, c)\nd = [\n    1,\n]\n",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_facts_decide(name: str) -> None:
    text, wanted = CASES[name]
    assert specialised(text, FACTS) == wanted


def test_without_facts_the_text_stays() -> None:
    text = "if mode.on:\n    a = 1\n"
    assert specialised(text, {}) == text


@pytest.mark.parametrize("x", [False, True])
@pytest.mark.parametrize("y", [False, True])
def test_what_is_left_does_the_same(x: bool, y: bool) -> None:
    text = """\
def f(mode, x, y):
    found = []
    if x and mode.on and not y:
        found.append(1 if mode.off else 2)
    elif mode.off or y:
        found.append(3)
    elif mode.none is None:
        found.append(4)
    for each in mode.empty:
        found.append(each)
    return found
"""

    class Mode:
        none, off, on, empty, set = None, False, True, (), object()

    found = []
    for each in (text, specialised(text, FACTS)):
        names: dict[str, object] = {}
        exec(each, names)
        found.append(names["f"](Mode, x, y))  # type: ignore[operator]
    assert found[0] == found[1]
    assert "mode." not in specialised(text, FACTS)
