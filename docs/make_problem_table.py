"""Writes docs/problem_files.md from a record of many problem files.

    python -m docs.make_problem_table [RECORD.json …]

Without arguments the page is written again from docs/h200/problem_files.json; with records of new
runs, their files replace those of that name first. A record is a JSON object of files by level and
name (`1_19_ReLU`), as a script that makes, checks and times a folder of files writes it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
KEPT = DOCS / "h200" / "problem_files.json"
PAGE = DOCS / "problem_files.md"
# What is kept of a file's record.
_FIELDS = (
    "level made_s chars state_dict warn close4 close2 worst ratio checked oom error "
    "eager ours eager_fb ours_fb"
).split()
MOST_ERROR = 100  # beyond it only the exact value, which is zero, says how large the error is
_LEVELS = {1: "Single operators", 2: "Short chains", 3: "Networks"}
Record = Mapping[str, Any]


def page(kept: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    files: Mapping[str, Record] = kept["files"]
    lines = ["# Public problem files", "", kept["conditions"], "", *_legend(), ""]
    for level, title in _LEVELS.items():
        mine = {name: each for name, each in files.items() if each["level"] == level}
        if mine:
            lines += [f"## {title}", "", *_summary(mine.values()), "", *_table(mine), ""]
    return "\n".join(lines)


def _legend() -> list[str]:
    return [
        "*Right*: outputs within 1e-4 of eager's (●), within 1e-2 (◐, TF32 through norms and",
        "deep networks), compared with float64 alone (○), or not compared in this run (–).",
        "*Error*: our error against float64",
        "over eager's, for the worst tensor among all outputs and gradients; – where float64 does",
        "not fit into memory. Times are medians in ms; the cache is flushed before each call.",
    ]


def _summary(files: Iterable[Record]) -> list[str]:
    listed = [*files]
    made = sum("chars" in each for each in listed)
    words = [f"{made} of {len(listed)} made"]
    for first, second, name in (("eager", "ours", "forward"), ("eager_fb", "ours_fb", "training")):
        ratios = [each[first] / each[second] for each in listed if first in each and second in each]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            words.append(f"{name} {mean:.2f}× eager ({len(ratios)} timed)")
    return ["; ".join(words) + " (geometric means)."]


def _table(files: Mapping[str, Record]) -> list[str]:
    head = [
        "file",
        "right",
        "error",
        "kB",
        "forward: eager → ours",
        "",
        "training: eager → ours",
        "",
    ]
    lines = [_row(head), _row(["---", *["---:"] * (len(head) - 1)])]
    for name, each in sorted(files.items()):
        size = f"{each['chars'] / 1000:.0f}" if "chars" in each else "–"
        times = [*_times(each, "eager", "ours"), *_times(each, "eager_fb", "ours_fb")]
        error = _error(each["ratio"]) if "ratio" in each else "–"
        lines.append(_row([name.replace("_", " "), _right(each), error, size, *times]))
    return lines


def _right(each: Record) -> str:
    if "error" in each:
        return "✗"
    if each.get("close4"):
        return "●"
    if each.get("close2"):
        return "◐"
    return "○" if "ratio" in each else "–"


def _error(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < MOST_ERROR else f"> {MOST_ERROR}"


def _times(each: Record, first: str, second: str) -> list[str]:
    if first not in each or second not in each:
        return ["–", ""]
    one, other = each[first], each[second]
    return [f"{one:.3g} → {other:.3g}", f"{one / other:.2f}×"]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def merged(kept: dict[str, Any], records: Iterable[Mapping[str, Record]]) -> dict[str, Any]:
    """The record with the files of newer ones."""
    files = dict(kept["files"])
    for record in records:
        for number, each in record.items():
            level, _, name = number.partition("_")
            facts = {**each, "level": int(level), "made_s": each.get("took_s")}
            files[name] = {key: facts[key] for key in _FIELDS if facts.get(key) is not None}
    return {**kept, "files": dict(sorted(files.items()))}


def main() -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"conditions": "", "files": {}}
    kept = merged(kept, (json.loads(Path(each).read_text()) for each in sys.argv[1:]))
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept))


if __name__ == "__main__":
    main()
