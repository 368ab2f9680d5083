"""The whole page as one self-contained HTML text, and its charts as PNG files."""

from __future__ import annotations

import base64
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from fusewright import __version__
from fusewright.bench import storage
from fusewright.bench.record import Record
from fusewright.bench.summary import collect
from fusewright.page.drawing import png
from fusewright.page.look import DARK, LIGHT, variables
from fusewright.page.markup import Html, anchor, joined, tag
from fusewright.page.overview import Entry, folder_charts, headline, overview
from fusewright.page.problem import brief, facts_line, failure, problem_charts, verdicts, whole
from fusewright.page.surroundings import surroundings

# A page of many problems shows sections in full up to this size. Later sections show times only.
WHOLE_BYTES = 1_000_000


def drawer(html: Path | None, folder: Path | None) -> Callable[[Sequence[Record]], Sequence[Path]]:
    """A function that draws records: a page, and charts in a folder. Raises now if the files cannot
    be written."""
    for path in (html, folder and folder / "chart.png"):
        if path:
            storage.require_writable(path)

    def draw(records: Sequence[Record]) -> Sequence[Path]:
        if html:
            storage.write_text(html, render(records))
        charts = charts_png(records, folder) if folder else ()
        return [*([html] if html else []), *charts]

    return draw


def render(records: Sequence[Record]) -> str:
    """One self-contained HTML text: one problem in full, or an overview and sections of several."""
    if len(records) == 1:
        name = records[0].problem.name
        return page(f"{name}: benchmark", _single(records[0]))
    ordered = collect(records).records
    entries = [
        Entry(each, f"p{index}-{anchor(each.problem.name)}")
        for index, each in enumerate(ordered, 1)
    ]
    return page(f"{len(entries)} problems: benchmark", _many(entries))


def charts_png(records: Sequence[Record], folder: Path) -> tuple[Path, ...]:
    """Write the charts of one problem, or for several problems the spread of their speedups."""
    folder.mkdir(parents=True, exist_ok=True)
    if len(records) == 1:
        charts, lead = [*problem_charts(records[0], LIGHT)], f"{anchor(records[0].problem.name)}-"
    else:
        charts, lead = folder_charts(collect(records).records, LIGHT), ""
    paths = []
    for chart in charts:
        path = folder / f"{lead}{chart.name}.png"
        with tempfile.TemporaryDirectory(prefix=".charts-", dir=folder) as drafts:
            png(chart, Path(drafts) / path.name)
            (Path(drafts) / path.name).replace(path)  # Readers never see half a file.
        paths.append(path)
    return tuple(paths)


def _single(record: Record) -> Html:
    head = tag("header", tag("h1", record.problem.name), verdicts(record), facts_line(record))
    body = failure(record) if record.status != "ok" else Html("")
    return joined((head, body, whole(record, "p", alone=True)))


def _many(entries: Sequence[Entry]) -> Html:
    if not entries:
        return tag("header", tag("h1", "No problems"), tag("p", "No records were found."))
    words, state = headline(entries)
    records = [each.record for each in entries]
    devices = dict.fromkeys(each.environment.device for each in records if each.environment)
    head = tag(
        "header",
        tag("h1", f"{len(entries)} problems"),
        tag("p", words, class_=f"verdict {state}"),
        tag("p", " · ".join(devices), class_="facts-line"),
    )
    sections = tag("section", tag("h2", "Problem by problem"), *_sections(entries))
    where = surroundings(records)
    last = tag("section", tag("h2", "How it was measured"), where) if where else Html("")
    return joined((head, overview(entries), sections, last))


def _sections(entries: Sequence[Entry]) -> list[Html]:
    """One collapsed section per problem. The first ones, which need attention, are in full."""
    made: list[Html] = []
    room = WHOLE_BYTES
    for each in entries:
        record = each.record
        body = failure(record)
        if record.passes:
            full = whole(record, each.anchor, alone=False) if room > 0 else Html("")
            room -= len(full.encode())
            body = joined((body, full or brief(record)))
        title = tag("summary", tag("b", record.problem.name), class_=each.level)
        inner = (title, verdicts(record), facts_line(record), body)
        made.append(tag("details", *inner, class_="problem", id=each.anchor))
    return made


def page(title: str, body: Html) -> str:
    """A self-contained page: styles, script and body in one text."""
    style, script = _packaged("style.css"), _packaged("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Only our own script runs and nothing is fetched, even if a name in a record contains HTML.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    colours = (
        f":root{{{variables(LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(colours + style)),
    )
    foot = tag("footer", f"Made by Fusewright {__version__} from the JSON record alone.")
    rest = tag("body", tag("main", body, foot), tag("script", Html(script)))
    return f"<!doctype html>\n{tag('html', head, rest, lang='en')}\n"


def _packaged(name: str) -> str:
    return (resources.files("fusewright.page") / name).read_text(encoding="utf-8")
