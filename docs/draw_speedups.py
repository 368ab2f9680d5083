"""Draws docs/speedups.svg from the records in docs/h200: `python -m docs.draw_speedups`.

A problem's newest record that has a torch.compile baseline counts. Bars show how many times as
fast as eager PyTorch a call is, by the medians of that record. The same records give the same
text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent
RECORDS = DOCS / "h200"
PICTURE = DOCS / "speedups.svg"
# The four reference problems, in the order of the README's table.
PROBLEMS = (
    "gemm_add_relu",
    "matmul_batchnorm_bias_divide_swish",
    "matmul_min_subtract",
    "conv2d_min_add_multiply",
)
COMPILED = ("compile", "max-autotune")
PASSES = {"forward": "forward", "train": "forward and backward"}
FONT = "font-family='system-ui, sans-serif'"
WIDTH, LEFT, UNIT = 760, 176, 88  # Pixels: the picture, where bars begin, one times eager.
BAR, GROUP, HEADING = 15, 40, 26
MOST = 6  # The axis ends there.
OURS, THEIRS, INK, SOFT, GRID = "#2a6fdb", "#a9b1bd", "#1b1f24", "#57606a", "#e3e6ea"


@dataclass(frozen=True)
class Bars:
    """One pass of one problem: speedups over eager."""

    name: str
    compiled: float
    ours: float


@dataclass(frozen=True)
class Group:
    """One problem: its precision class, the day it was measured, its passes."""

    problem: str
    precision: str
    day: str
    device: str
    torch: str
    passes: tuple[Bars, ...]


def records() -> Iterator[dict[str, Any]]:
    """Every benchmark record in the folder; those of a collection one by one."""
    for path in sorted(RECORDS.glob("*.json")):
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            continue
        if found.get("schema") == "fusewright-bench":
            yield found
        elif found.get("schema") == "fusewright-bench-collection":
            yield from found["records"]


def groups() -> tuple[Group, ...]:
    """The newest record of each reference problem in which torch.compile ran as well."""
    newest: dict[str, dict[str, Any]] = {}
    for record in sorted(records(), key=lambda each: str(each["started_at"])):
        if set(COMPILED) & set(record["settings"]["baselines"]):
            newest[record["problem"]["name"]] = record
    return tuple(_group(newest[name]) for name in PROBLEMS)


def _group(record: dict[str, Any]) -> Group:
    ours = next(each for each in record["passes"][0]["results"] if each["candidate"] == "ours")
    return Group(
        record["problem"]["name"],
        ours["precision"].upper() if ours["precision"] == "tf32" else ours["precision"],
        record["started_at"][:10],
        record["environment"]["device"],
        record["environment"]["versions"]["torch"].split("+")[0],
        tuple(_bars(each) for each in record["passes"]),
    )


def _bars(found: dict[str, Any]) -> Bars:
    medians = {
        each["candidate"]: each["timing"]["median_us"]
        for each in found["results"]
        if each["timing"]
    }
    compiled = min(medians[name] for name in COMPILED if name in medians)
    eager = medians["eager"]
    return Bars(PASSES[found["name"]], eager / compiled, eager / medians["ours"])


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f"<text x='{x:g}' y='{y:g}' fill='{INK}' {more}>{escape(words)}</text>"


def _bar(y: float, times: float, colour: str) -> Iterator[str]:
    yield (
        f"<rect x='{LEFT}' y='{y:g}' width='{times * UNIT:.1f}' height='{BAR - 2}' rx='2' "
        f"fill='{colour}'/>"
    )
    yield _text(LEFT + times * UNIT + 6, y + BAR - 4, f"{times:.2f}×", "font-size='12'")


def _axis(top: float, bottom: float) -> Iterator[str]:
    for times in range(MOST + 1):
        x, colour = LEFT + times * UNIT, SOFT if times == 1 else GRID
        yield f"<path d='M{x} {top:g}V{bottom:g}' stroke='{colour}'/>"
        words = "eager" if times == 1 else f"{times}×"
        yield _text(x, bottom + 16, words, "font-size='12' text-anchor='middle'")


def _legend(y: float) -> Iterator[str]:
    for x, colour, words in (
        (LEFT, OURS, "Fusewright"),
        (LEFT + 110, THEIRS, "torch.compile, its faster mode"),
    ):
        yield f"<rect x='{x}' y='{y - 10:g}' width='12' height='12' rx='2' fill='{colour}'/>"
        yield _text(x + 18, y, words, "font-size='13'")


def picture(found: tuple[Group, ...]) -> str:
    """The chart as SVG text."""
    lines: list[str] = []
    y = 74.0
    for group in found:
        heading = f"{group.problem} · {group.precision} · {group.day}"
        lines.append(_text(16, y + 14, heading, "font-size='13' font-weight='600'"))
        y += HEADING
        for bars in group.passes:
            lines.append(_text(16, y + BAR + 3, bars.name, "font-size='12'"))
            lines += _bar(y, bars.ours, OURS)
            lines += _bar(y + BAR, bars.compiled, THEIRS)
            y += GROUP
    title = f"Times as fast as eager PyTorch {found[0].torch} on an {found[0].device}"
    head = [
        f"<rect width='{WIDTH}' height='{y + 34:g}' rx='8' fill='#ffffff'/>",
        _text(16, 28, title, "font-size='16' font-weight='600'"),
        *_legend(54),
        *_axis(74, y),
    ]
    opening = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {y + 34:g}' "
        f"role='img' aria-label='{escape(title)}' {FONT}>"
    )
    return "\n".join([opening, *head, *lines, "</svg>", ""])


def main() -> None:
    PICTURE.write_text(picture(groups()), encoding="utf-8")
    print(f"{PICTURE.name} written")


if __name__ == "__main__":
    main()
