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
from itertools import zip_longest

from fusewright.emit.edits import Edit, Spot, edited, lines_of, span

_WORDS = re.compile(r"pass|\b(?:try|except)\b")
# A string literal that can contain an escape: neither a raw string nor an f-string.
_PLAIN_PREFIX = re.compile(r"[bBuU]?['\"]")
_CPP_COMMENT = re.compile(r"//[^\n]*")


def respelt(python: str) -> str:
    """The same program without the refused words."""
    if not _WORDS.search(python):
        return python
    lines, tree = lines_of(python), ast.parse(python)
    # A program that reads docstrings keeps them as they are.
    kept = "__doc__" in python and _reads_docstrings(tree)
    edits: list[Edit] = []
    for first, last, statements in _sections(tree, len(lines)):
        text = "".join(lines[first:last])
        if _WORDS.search(text):
            documents = [] if kept else _docstrings(statements, lines)
            edits += _respelt_tokens(text, first, documents)
    return edited(lines, [each for each in edits if each.text != each.old])


def respelt_cpp(text: str) -> str:
    """The same translation unit without the refused words in its comments."""
    return _CPP_COMMENT.sub(lambda comment: _WORDS.sub(_dotted, comment.group()), text)


def _sections(tree: ast.Module, n_lines: int) -> Iterator[tuple[int, int, list[ast.stmt]]]:
    """The lines of each statement, from the first to before the last, with those in front of it.
    Statements that share a line stay together. A tokenizer takes long, and few have such words."""
    first, held = 0, list[ast.stmt]()
    for each, after in zip_longest(tree.body, tree.body[1:]):
        held.append(each)
        end = each.end_lineno or 0
        if after is not None and after.lineno > end:
            yield first, end, held
            first, held = end, []
    yield first, n_lines, held


def _reads_docstrings(tree: ast.Module) -> bool:
    words = (getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree))
    return any("__doc__" in word for word in words)


def _docstrings(statements: Sequence[ast.stmt], lines: Sequence[str]) -> list[tuple[Spot, Spot]]:
    """Where strings are statements, such as docstrings."""
    return [
        span(node.value, lines)
        for each in statements
        for node in ast.walk(each)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def _respelt_tokens(
    source: str, above: int, docstrings: Sequence[tuple[Spot, Spot]]
) -> Iterator[Edit]:
    """Replacements for the tokens that contain a refused word, in the lines below those `above`."""
    inside = 0  # nested f-strings; before Python 3.12 their code may not contain a backslash
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        inside += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        text = token.string
        if inside or not _WORDS.search(text):
            continue
        (first, column), (last, end) = token.start, token.end
        spots = (first + above, column), (last + above, end)
        if kind == "NAME" and text == "pass":
            text = "..."
        elif kind == "COMMENT":
            text = _WORDS.sub(_dotted, text)
        elif kind == "STRING":
            documents = any(a <= spots[0] and spots[1] <= b for a, b in docstrings)
            text = _WORDS.sub(_dotted, text) if documents else _escaped(text)
        yield Edit(*spots, token.string, text)


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
