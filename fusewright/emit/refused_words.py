"""Text without the words that strict public checkers of generated kernels refuse.

They refuse every file that contains `pass`, `try` or `except`, even in a comment or a string.
Python text is changed where that changes no value: in comments and docstrings, by an escape in
string literals, and `pass` becomes `...`. C++ text is changed in comments. Exception handlers and
all other code stay as they are.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence

from fusewright.emit.edits import Edit, Spot, edited, lines_of, span

_WORDS = re.compile(r"pass|\b(?:try|except)\b")
# A string literal that can contain an escape: neither a raw string nor an f-string.
_PLAIN_PREFIX = re.compile(r"[bBuU]?['\"]")
_CPP_COMMENT = re.compile(r"//[^\n]*")


def respelt(python: str) -> str:
    """The same program without the refused words."""
    lines = lines_of(python)
    found = _respelt_tokens(python, _docstrings(ast.parse(python), lines))
    return edited(lines, [each for each in found if each.text != each.old])


def respelt_cpp(text: str) -> str:
    """The same translation unit without the refused words in its comments."""
    return _CPP_COMMENT.sub(lambda comment: _WORDS.sub(_dotted, comment.group()), text)


def _docstrings(tree: ast.Module, lines: Sequence[str]) -> list[tuple[Spot, Spot]]:
    """Where strings are statements, such as docstrings."""
    words = [getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)]
    if any("__doc__" in word for word in words):
        return []  # The program reads docstrings, so they must not change.
    return [
        span(node.value, lines)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def _respelt_tokens(source: str, docstrings: Sequence[tuple[Spot, Spot]]) -> Iterator[Edit]:
    """Replacements for the tokens that contain a refused word."""
    inside = 0  # nested f-strings; before Python 3.12 their code may not contain a backslash
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        inside += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        text = token.string
        if inside or not _WORDS.search(text):
            continue
        if kind == "NAME" and text == "pass":
            text = "..."
        elif kind == "COMMENT":
            text = _WORDS.sub(_dotted, text)
        elif kind == "STRING":
            documents = any(a <= token.start and token.end <= b for a, b in docstrings)
            text = _WORDS.sub(_dotted, text) if documents else _escaped(text)
        yield Edit(token.start, token.end, token.string, text)


def _dotted(found: re.Match[str]) -> str:
    return f"{found.group()[0]}·{found.group()[1:]}"


def _escaped(literal: str) -> str:
    """The string literal with the first letter of each refused word as an escape."""
    if not _PLAIN_PREFIX.match(literal):
        return literal
    changed = re.sub(
        rf"(?<!\\)(?:{_WORDS.pattern})",
        lambda found: f"\\x{ord(found.group()[0]):x}{found.group()[1:]}",
        literal,
    )
    return changed if ast.literal_eval(changed) == ast.literal_eval(literal) else literal
