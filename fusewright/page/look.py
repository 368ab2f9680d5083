"""All colours: the page's light and dark themes, and the placeholders that charts use.

matplotlib writes colours as numbers. A chart for the page is drawn in placeholder colours that
nothing else uses. Each is then replaced by its CSS variable, so one drawing fits both themes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fusewright.bench.record import BASELINES, Record

# A precision class without an entry is drawn with the last marker.
MARKERS = {"fp64": "p", "fp32": "o", "tf32": "^", "fp16": "v", "bf16": "s", "": "X"}
OURS = 0


@dataclass(frozen=True)
class Palette:
    """`series` holds our colour, four for baselines and three for other candidates, in order."""

    paper: str
    panel: str
    ink: str
    soft: str
    grid: str
    good: str
    bad: str
    warn: str
    series: tuple[str, ...]

    def items(self) -> Iterator[tuple[str, str]]:
        """Each CSS variable with its value."""
        for each in dataclasses.fields(self):
            if each.name != "series":
                yield f"--{each.name}", getattr(self, each.name)
        yield from ((f"--s{index}", value) for index, value in enumerate(self.series))


LIGHT = Palette(
    paper="#ffffff",
    panel="#f5f6f8",
    ink="#1b1f27",
    soft="#5a6372",
    grid="#d9dde3",
    good="#15803d",
    bad="#c2241b",
    warn="#a15c00",
    series=tuple("#2560d8 #6b7280 #c2620a #0b7d73 #8b34c9 #c2186b #86501b #55720a".split()),
)
DARK = Palette(
    paper="#12151b",
    panel="#1b2029",
    ink="#e8ebf0",
    soft="#a3adbb",
    grid="#343c49",
    good="#4ade80",
    bad="#ff7a70",
    warn="#fbbf24",
    series=tuple("#6ea8ff #9aa4b2 #f0a14a #3fd0c0 #c79bff #ff7fb4 #d9a878 #b3d34c".split()),
)
_NUMBERED: list[Any] = [f"#fe01{index:02x}" for index in range(8)]
_NUMBERED.append(tuple(f"#fe02{index:02x}" for index in range(8)))
STAND_IN = Palette(*_NUMBERED)


def variables(palette: Palette) -> str:
    """CSS declarations of all colours."""
    return "".join(f"{name}:{value};" for name, value in palette.items())


def themed(text: str) -> str:
    """The text with every placeholder colour replaced by its CSS variable."""
    for name, value in STAND_IN.items():
        text = text.replace(value, f"var({name})")
    return text


def series_of(record: Record, candidate: str) -> int:
    """A candidate's index in `Palette.series`: the same in every chart of every problem."""
    kinds = {each.name: each.kind for each in record.candidates}
    kind = kinds.get(candidate, candidate)
    if kind == "ours":
        return OURS
    if kind in BASELINES:
        return 1 + BASELINES.index(kind)
    foreign = [each.name for each in record.candidates if each.kind not in ("ours", *BASELINES)]
    index = foreign.index(candidate) if candidate in foreign else 0
    return 1 + len(BASELINES) + index % (len(LIGHT.series) - 1 - len(BASELINES))
