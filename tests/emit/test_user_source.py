"""The user's part of an emitted file: nothing is lost, and words that checkers refuse are
replaced."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from fusewright.emit.refused_words import respelt, respelt_cpp
from fusewright.emit.user import read
from tests.support.emitted_files import FORBIDDEN_WORDS


def executed(source: str) -> tuple[dict[str, Any], str]:
    user = read(source)
    rest = respelt(user.rest)
    text = "\n".join([*user.future, rest])
    names: dict[str, Any] = {}
    exec(compile(text, "<user>", "exec", dont_inherit=True), names)
    return names, rest


FUTURES = {
    "alone": "from __future__ import annotations\nimport math as m\n",
    "one line": "from __future__ import annotations; import os, math as m\n",
    "spread": "from __future__ import annotations ; \\\nimport math as m\n",
    "brackets": "from __future__ import (\n    annotations,\n)\nimport math as m\n",
    "two": "from __future__ import annotations;from __future__ import division;import math as m\n",
    "after a string": "'Ünö'; from __future__ import annotations; import math as m\n",
    "form feed": "\f\n\ffrom __future__ import annotations\n\f\nimport math as m\n",
    "comment": "from __future__ import annotations  # why\nimport math as m\n",
    "windows": "from __future__ import annotations\r\nimport math as m\r\n",
}


@pytest.mark.parametrize("name", FUTURES)
def test_only_future_statements_are_taken_out(name: str) -> None:
    source = FUTURES[name] + "def f(x: Missing): return m.sqrt(x)\n"
    names, rest = executed(source)
    assert names["f"](4.0) == 2.0 and "__future__" not in rest
    assert names["f"].__annotations__ == {"x": "Missing"}


def test_only_line_feeds_end_lines() -> None:
    source = (
        "from __future__ import annotations\n"
        "odd = 'a\u2028b\x0bc\x0cd\x1ce\x85f'\n"
        "import math; last = 'pass'  # ü pass\n"
    )
    names, rest = executed(source)
    assert names["odd"] == "a\u2028b\x0bc\x0cd\x1ce\x85f" and names["last"] == "pass"
    assert not re.search(FORBIDDEN_WORDS, rest)


WORDY = '''"""The forward pass: try it, except on Sundays."""
import re  # pass

class Empty: pass  # try

class Note(Exception):
    r"""Raw: \\d pass."""

def f(x):
    """A pass
    with two lines, except the first."""
    # forward pass
    if x: pass
    else:
        pass; y = 1
    y = "by" "pass", 'try\\nexcept', b"pass", u"pass", """pass
    and pass""", "\\\\pass", "\\try"
    return y

g = lambda s: (re.sub(r"pass", "x", s), f"{'pass'} pass")
'''


def test_refused_words_are_respelt_and_values_stay() -> None:
    theirs: dict[str, Any] = {}
    exec(compile(WORDY, "<theirs>", "exec"), theirs)
    ours, rest = executed(WORDY)
    for each in (0, 1):
        assert ours["f"](each) == theirs["f"](each)
    assert ours["g"]("pass") == theirs["g"]("pass") == ("x", "pass pass")
    left = [line for line in rest.splitlines() if re.search(FORBIDDEN_WORDS, line)]
    # These have no other spelling: a raw string, code inside of a string, a tab before "ry".
    assert len(left) == 2 and "g = lambda" in left[1] and "\\try" in left[0]
    assert "# forward p·ass" in rest and "class Empty: ...  # t·ry" in rest


def test_the_users_own_handlers_stay_and_docstrings_that_are_read_keep_their_value() -> None:
    source = (
        "def f():\n    '''One pass.'''\n    try:\n        return 1 / 0\n"
        "    except ZeroDivisionError:\n        return f.__doc__\n"
    )
    names, rest = executed(source)
    assert names["f"]() == "One pass." and "except ZeroDivisionError" in rest
    assert "pass" not in rest


def test_a_source_without_such_words_is_left_alone() -> None:
    source = "import math\n\n\nclass Model:\n    '''Fine.'''\n\n    x = 'ü' # é\n"
    assert respelt(read(source).rest) == source
    assert ast.dump(ast.parse(read(WORDY).rest)) == ast.dump(ast.parse(read(read(WORDY).rest).rest))


def test_the_words_stand_between_and_beside_statements() -> None:
    source = (
        "# the first pass\n@staticmethod  # pass\ndef f():\n    'try'\n\n\n"
        "x = 1; y = 'pass'; z = '''a\npass'''; w = 'try'\n"
        "# between: try\nv = [\n    'except',  # except\n]\n# the last pass\n"
    )
    assert respelt(source) == (
        "# the first p·ass\n@staticmethod  # p·ass\ndef f():\n    't·ry'\n\n\n"
        "x = 1; y = '\\x70ass'; z = '''a\n\\x70ass'''; w = '\\x74ry'\n"
        "# between: t·ry\nv = [\n    '\\x65xcept',  # e·xcept\n]\n# the last p·ass\n"
    )


def test_kernels_are_respelt_in_comments() -> None:
    text = "int a;  // a second pass, except here\nint b;  // try\n"
    assert respelt_cpp(text) == "int a;  // a second p·ass, e·xcept here\nint b;  // t·ry\n"
