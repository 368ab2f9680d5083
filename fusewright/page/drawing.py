"""A matplotlib figure as SVG text for the page or as a PNG file.

The SVG holds real text in the page's own font, colours as CSS variables, and for every mark a
title that says what it shows; the same figure always gives the same text.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fusewright.page.look import Palette, themed
from fusewright.page.markup import Html, clean

# A phone's width: the page enlarges a chart where there is room, and text stays readable.
WIDTH_IN = 5.4
_POINTS_PER_INCH = 72.0
_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_MARK = "mark-"
_NUMBERS = frozenset("d x y transform viewBox".split())
# Text is in the page's own font; only its size and anchor are the chart's.
_FONT = re.compile(r"font-family: [^;]*; ?")
_REFERRED = ("path", "pattern")
_DROPPED = ("style", "clipPath", "metadata")
_NO_TURN = re.compile(r"^rotate\(-?0 [^)]*\)$")
_FRACTION = re.compile(r"(\d+\.\d)\d+")
_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.labelsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "hatch.linewidth": 1.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "fusewright",
    # A name may hold dollar signs, which are no formula.
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Chart:
    """`tips` maps the marks' ids to what a reader sees when pointing at them."""

    name: str
    title: str
    figure: Figure
    tips: Mapping[str, str]


class Canvas:
    """One figure with one plot while it is being drawn; `chart` hands it over."""

    def __init__(self, palette: Palette, height_in: float) -> None:
        self.palette = palette
        self.figure = Figure(
            figsize=(WIDTH_IN, height_in), layout="constrained", facecolor=palette.paper
        )
        self.axes: Axes = self.figure.add_subplot(facecolor=palette.paper)
        self._tips: dict[str, str] = {}
        for spine in self.axes.spines.values():
            spine.set_edgecolor(palette.soft)
        self.axes.tick_params(which="both", colors=palette.soft, labelcolor=palette.soft)
        self.axes.set_axisbelow(True)

    def mark(self, artist: Artist, tip: str) -> None:
        """Whoever points at the artist reads the tip."""
        gid = f"{_MARK}{len(self._tips)}"
        artist.set_gid(gid)
        self._tips[gid] = tip

    def label_axes(self, x: str, y: str = "") -> None:
        self.axes.set_xlabel(x, color=self.palette.soft)
        self.axes.set_ylabel(y, color=self.palette.soft)

    def legend_below(self, columns: int) -> None:
        if self.axes.get_legend_handles_labels()[1]:
            self.figure.legend(
                loc="outside lower left",
                ncols=columns,
                labelcolor=self.palette.ink,
                fontsize=9.5,
                handletextpad=0.3,
                columnspacing=1.0,
            )

    def chart(self, name: str, title: str) -> Chart:
        return Chart(name, title, self.figure, self._tips)


@contextmanager
def settings() -> Iterator[None]:
    """Fonts and formats, for drawing and for writing alike; nothing of them outlives this."""
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        # Letters that matplotlib's font lacks are the browser's to draw.
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        # A plot with a single mark still gets its axes.
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        yield


def svg(chart: Chart, prefix: str) -> Html:
    """The chart as an inline element; `prefix` keeps its ids apart from those of other charts."""
    stream = io.StringIO()
    with settings():
        FigureCanvasSVG(chart.figure)
        # A date would make every text another one.
        chart.figure.savefig(stream, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(clean(stream.getvalue()))
    for element in list(root.iter()):
        _tidy(element, prefix, chart.tips)
    _flatten(root)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib.update({"class": "chart", "role": "group", "tabindex": "0"})
    root.set("aria-label", clean(chart.title))
    return Html(ElementTree.tostring(root, encoding="unicode"))


def png(chart: Chart, path: Path) -> None:
    """The chart as a picture file, at twice the size of a screen's dots."""
    with settings():
        FigureCanvasAgg(chart.figure)
        chart.figure.savefig(path, format="png", dpi=2 * _POINTS_PER_INCH, metadata={})


def _tidy(element: ElementTree.Element, prefix: str, tips: Mapping[str, str]) -> None:
    element.tag = element.tag.removeprefix(_SVG)
    attributes = element.attrib
    # Nothing is drawn beyond its axes, so nothing has to be cut off there.
    attributes.pop("clip-path", None)
    name = attributes.pop("id", "")
    if name in tips:
        attributes.update({"class": "mark", "role": "img", "tabindex": "-1"})
        title = ElementTree.Element("title")
        title.text = clean(tips[name])
        element.insert(0, title)
    elif name and element.tag in _REFERRED:
        attributes["id"] = prefix + name
    if _LINK in attributes:
        attributes["href"] = "#" + prefix + attributes.pop(_LINK).removeprefix("#")
    # Variables work in styles only.
    colours = [f"{key}: {attributes.pop(key)}" for key in ("fill", "stroke") if key in attributes]
    if colours:
        attributes["style"] = "; ".join(filter(None, [attributes.get("style"), *colours]))
    if "style" in attributes:
        style = themed(_FONT.sub("", attributes["style"])).replace("url(#", f"url(#{prefix}")
        attributes["style"] = style.replace("; ", ";").replace(": ", ":")
    for key in _NUMBERS & attributes.keys():
        attributes[key] = " ".join(_FRACTION.sub(r"\1", attributes[key]).split())
    if _NO_TURN.match(attributes.get("transform", "")):
        del attributes["transform"]
    if element.text and not element.text.strip():
        element.text = None
    element.tail = None


def _flatten(element: ElementTree.Element) -> None:
    """Groups that say nothing give way to their children; what the page brings itself goes."""
    kept: list[ElementTree.Element] = []
    for child in element:
        _flatten(child)
        if child.tag == "g" and not child.attrib:
            kept += child
        elif child.tag not in _DROPPED and (child.tag != "defs" or len(child)):
            kept.append(child)
    element[:] = kept
