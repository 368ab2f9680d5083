"""HTML elements as text. Every text that goes in is escaped, unless it is `Html` already."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

# HTML and XML forbid control characters and single surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset(("meta", "br"))


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def clean(text: str) -> str:
    """The text with every character that HTML forbids replaced by �."""
    return _UNPRINTABLE.sub("\ufffd", text)


def escaped(text: str) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(clean(text)))


def joined(parts: Iterable[str], separator: str = "") -> Html:
    return Html(separator.join(escaped(each) for each in parts))


def tag(name: str, /, *children: str, **attributes: str | int | float | bool | None) -> Html:
    """An element. `class_` becomes class, `data_tip` data-tip; None and False are left out."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        written = key.rstrip("_").replace("_", "-")
        words.append(written if value is True else f'{written}="{escaped(str(value))}"')
    if name in _VOID:
        return Html(f"<{' '.join(words)}>")
    return Html(f"<{' '.join(words)}>{joined(children)}</{name}>")


def table(
    heads: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    caption: str,
    class_: str = "",
    words: int = 1,
) -> Html:
    """A table that scrolls on its own on narrow pages. A row may be a finished `Html` element.

    The first `words` columns are left-aligned; the others hold figures.
    """
    body = (
        row if isinstance(row, Html) else tag("tr", *(each for each in map(cell, row)))
        for row in rows
    )
    columns = (
        tag("th", each, scope="col", class_="n" if index >= words else None)
        for index, each in enumerate(heads)
    )
    head = tag("thead", tag("tr", *columns))
    inner = tag("table", tag("caption", caption), head, tag("tbody", *body), class_=class_ or None)
    # A region must be focusable to scroll with the keyboard.
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def cell(content: str) -> Html:
    """A table cell with this content, or the content itself if it is a cell."""
    if isinstance(content, Html) and content.startswith(("<td", "<th")):
        return content
    return tag("td", content)


def anchor(text: str) -> str:
    """A name for id= and #links: letters, digits and dashes only."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower() or "x"
