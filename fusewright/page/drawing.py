"""A matplotlib figure as SVG text for the page, or as a PNG file.

The SVG keeps text as text in the page's font, uses CSS variables for colours, and gives every mark
a title that says what it shows. The same figure always gives the same SVG text.
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
from matplotlib.text import Annotation

from fusewright.page.figures import in_words, title_of
from fusewright.page.look import Palette, themed
from fusewright.page.markup import Html, clean

# A phone's width. The page enlarges a chart if there is room, so text stays readable.
WIDTH_IN = 5.4
_POINTS_PER_INCH = 72.0
_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_MARK = "mark-"
_NUMBERS = frozenset("d x y transform viewBox".split())
# Text uses the page's font. Only its size and anchor come from the chart.
_FONT = re.compile(r"font-family: [^;]*; ?")
_REFERRED = ("path", "pattern")
_DROPPED = ("style", "clipPath", "metadata")
_NO_ROTATION = re.compile(r"^rotate\(-?0 [^)]*\)$")
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
    # A name may contain dollar signs. They do not mark a formula.
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Chart:
    """A finished figure. `tips` maps the id of a mark to its tooltip."""

    name: str
    title: str
    figure: Figure
    tips: Mapping[str, str]


class Canvas:
    """One figure with one plot, while it is being drawn. `chart` returns the finished one."""

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

    def write(
        self,
        text: str,
        at: tuple[float, float],
        offset: tuple[float, float] | None = None,
        **style: Any,
    ) -> Annotation:
        """Write a text at a point, or `offset` points away from it."""
        moved = {"xytext": offset, "textcoords": "offset points"} if offset else {}
        usual = {"color": self.palette.ink, "fontsize": 9.5}
        return self.axes.annotate(text, at, **{**usual, **moved, **style})

    def dot(self, x: float, y: float, marker: str, *tip: str, **style: Any) -> None:
        """Draw one mark; the reader sees the lines of `tip` when pointing at it."""
        (artist,) = self.axes.plot([x], [y], marker, **style)
        self.mark(artist, "\n".join(tip))

    def mark(self, artist: Artist, tip: str) -> None:
        """Show `tip` when the reader points at the artist."""
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

    def chart(self, kind: str, title: str, pass_name: str, more: str = "") -> Chart:
        """The finished chart of one pass; `more` follows the name of the pass in its heading."""
        self.axes.set_title(title_of(pass_name) + more, color=self.palette.ink)
        name, title = f"{kind}-{pass_name}", f"{title}, {in_words(pass_name)}"
        return Chart(name, title, self.figure, self._tips)


@contextmanager
def settings() -> Iterator[None]:
    """Set fonts and formats for drawing and for writing. They are restored on exit."""
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        # The browser draws letters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        # matplotlib warns about plots with a single mark, but draws their axes.
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        yield


def svg(chart: Chart, prefix: str) -> Html:
    """The chart as an inline element. `prefix` makes its ids unique in the page."""
    stream = io.StringIO()
    with settings():
        FigureCanvasSVG(chart.figure)
        # With a date, the text would differ from run to run.
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
    """Write the chart as a PNG file at twice the usual screen resolution."""
    with settings():
        FigureCanvasAgg(chart.figure)
        chart.figure.savefig(path, format="png", dpi=2 * _POINTS_PER_INCH, metadata={})


def _tidy(element: ElementTree.Element, prefix: str, tips: Mapping[str, str]) -> None:
    element.tag = element.tag.removeprefix(_SVG)
    attributes = element.attrib
    # Nothing is drawn outside the axes, so nothing needs clipping.
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
    # CSS variables work in styles only.
    colours = [f"{key}: {attributes.pop(key)}" for key in ("fill", "stroke") if key in attributes]
    if colours:
        attributes["style"] = "; ".join(filter(None, [attributes.get("style"), *colours]))
    if "style" in attributes:
        style = themed(_FONT.sub("", attributes["style"])).replace("url(#", f"url(#{prefix}")
        attributes["style"] = style.replace("; ", ";").replace(": ", ":")
    for key in _NUMBERS & attributes.keys():
        attributes[key] = " ".join(_FRACTION.sub(r"\1", attributes[key]).split())
    if _NO_ROTATION.match(attributes.get("transform", "")):
        del attributes["transform"]
    if element.text and not element.text.strip():
        element.text = None
    element.tail = None


def _flatten(element: ElementTree.Element) -> None:
    """Replace groups without attributes by their children; drop what the page itself provides."""
    kept: list[ElementTree.Element] = []
    for child in element:
        _flatten(child)
        if child.tag == "g" and not child.attrib:
            kept += child
        elif child.tag not in _DROPPED and (child.tag != "defs" or len(child)):
            kept.append(child)
    element[:] = kept
