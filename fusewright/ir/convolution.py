"""The description of one convolution: what slides over what, and the epilogue that it ends in.

    result[n, o, y, x] = Σ source[n, c, y·stride − before + j·dilation, …] · weights[o, c, j, i]

over channels c and taps (j, i) of the group that o belongs to, with zeros outside of the source.
A third axis z goes before y likewise; images of two dimensions have a single z, those of one a
single row. A transposed convolution turns this round, as the
gradient of one by its source does:

    result[n, o, y·stride − before + j·dilation, …] = Σ source[n, c, y, x] · weights[o, c, j, i]

Results with the same remainders by the stride are a class: a convolution of stride 1 with those
taps that meet it. Those of one class do not lie beside each other; with a stride of 2 along x both
remainders are woven together instead, see `by_eight`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusewright.ir.epilogue import Ending, Reduces
from fusewright.ir.graph import ONE, ZERO, Arg, Dim, TensorSpec
from fusewright.ir.loop import Argument, Load, LoopKernel

FEW_RESULTS = range(9, 33)  # of a group: two warps would finish them


@dataclass(frozen=True)
class WindowAxis:
    """One direction of an image."""

    size: int
    result: int
    taps: int
    stride: int
    dilation: int
    before: int
    transposed: bool = False
    one_plane: bool = False  # of the source, which all classes read
    least: int = 0  # of the extent, to be as large as another's

    @property
    def positions(self) -> int:
        """Results, or those of the largest class."""
        return -(-self.result // self.stride) if self.transposed else self.result

    @property
    def halo(self) -> int:
        """How many positions further than its own the furthest tap reads."""
        if not self.transposed:
            return (self.taps - 1) * self.dilation // self.stride
        if self.one_plane:
            far = (self.taps - 1) * self.dilation - self.before
            return far // self.stride - -self.before // self.stride
        common = math.gcd(self.stride, self.dilation)
        return (max(self.phases) - 1) * self.dilation // common

    @property
    def extent(self) -> int:
        """Positions between the beginnings of two rows, or planes. The zeros behind one row may
        be those before the next; `extent` of kernels/convolution/taps.cuh."""
        every = self.positions + self.halo
        if self.stride > 1:
            return max(every, self.least)
        before = self.halo - self.before if self.transposed else self.before
        return max(min(every, max(self.result, self.size + before, every - before)), self.least)

    @property
    def deep(self) -> int:
        """The same along z, where only lines have what lies in halos."""
        return self.extent if self.one_plane else self.positions

    @property
    def is_single(self) -> bool:
        """Whether nothing moves along it, and nothing lies beside it."""
        numbers = (self.size, self.result, self.taps, self.stride, self.before)
        return numbers == (1, 1, 1, 1, 0)

    @property
    def phases(self) -> tuple[int, ...]:
        """How many taps there are for each remainder that their distances have by the stride; for
        each class, if this is transposed."""
        first = self.before if self.transposed else 0
        found = [0] * self.stride
        for tap in range(self.taps):
            found[(tap * self.dilation - first) % self.stride] += 1
        return tuple(taps for taps in found if taps or self.transposed)


SINGLE = WindowAxis(1, 1, 1, 1, 1, 0)


@dataclass(frozen=True)
class RowOrder:
    """A convolution whose weights go by eight; RowOrder of kernels/convolution/operands.cuh."""

    beside: int  # columns of a position
    results: int  # of a group
    columns: int
    taps: int  # along x
    first: int  # the tap that its own first is for even columns


@dataclass(frozen=True)
class Geometry:
    """The sizes of a convolution; `channels` and `results` are those of one group."""

    images: Dim
    groups: int
    channels: int
    results: int
    y: WindowAxis
    x: WindowAxis
    row_order: RowOrder | None = None
    z: WindowAxis = SINGLE

    @property
    def axes(self) -> tuple[WindowAxis, WindowAxis, WindowAxis]:
        return self.z, self.y, self.x

    @property
    def taps(self) -> int:
        return math.prod(axis.taps for axis in self.axes)

    @property
    def pixels(self) -> int:
        """Of the result, in an image."""
        return math.prod(axis.result for axis in self.axes)

    @property
    def rows(self) -> int:
        """Of the result, those of all z."""
        return self.z.result * self.y.result

    @property
    def has_rows_and_columns(self) -> bool:
        """Whether there may be several channels, and several positions, of results."""
        many = self.pixels > 1 or self.images != ONE
        return self.groups * self.results > 1 and many

    @property
    def transposed(self) -> bool:
        return self.x.transposed

    @property
    def strided(self) -> bool:
        return math.prod(axis.stride for axis in self.axes) > 1

    @property
    def in_lines(self) -> Geometry:
        """As its source is laid out in lines: all classes read one plane, and what lies between
        images along z is there."""
        z, y, x = (replace(axis, one_plane=True) for axis in self.axes)
        return replace(self, z=z, y=y, x=x)

    @property
    def turned_back(self) -> Geometry:
        """The transposed convolution that is the gradient of this one by its source."""
        z, y, x = (
            replace(axis, size=axis.result, result=axis.size, transposed=True) for axis in self.axes
        )
        return replace(self, channels=self.results, results=self.channels, z=z, y=y, x=x)

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.row_order.columns if self.row_order else self.x.result

    @property
    def used_results(self) -> int:
        """Those that there are, one for each column of a position."""
        return self.row_order.results * self.row_order.beside if self.row_order else self.results

    @property
    def phases(self) -> tuple[int, ...]:
        """The taps that are read together: of one z, and of one pair of remainders."""
        return tuple(taps for each in self.classes for taps in each)

    @property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """The phases of each class of results; there is one, unless this is transposed."""
        planes = [y * x for y in self.y.phases for x in self.x.phases]
        if not self.transposed:
            return (tuple(planes * self.z.taps),)
        return tuple((taps,) * z if taps else () for z in self.z.phases for taps in planes)

    @property
    def planes(self) -> int:
        """Of the source, as lines have them: one for all classes, or one for each remainder."""
        return 1 if self.transposed else math.prod(len(axis.phases) for axis in self.axes)

    @property
    def workspace_bytes(self) -> int:
        """Both halves of the weights and a scale for each result.

        Weights are laid out in boxes of 64: those of all 64 channels for a tap, or, of what is
        left, 16 channels of four taps of a phase and so on.
        """
        blocks, rest = divmod(self.channels, 64)
        boxes = blocks * self.taps + sum(-(-taps * -(-rest // 16) // 4) for taps in self.phases)
        return 4 * self.groups * self.results * (boxes * 64 + 1)

    @property
    def filter_elements(self) -> int:
        return self.groups * self.results * self.channels * self.taps

    def source_elements(self, sizes: Mapping[str, int]) -> int:
        pixels = math.prod(axis.size for axis in self.axes)
        return self.images.at(sizes) * self.groups * self.channels * pixels

    def result_elements(self, sizes: Mapping[str, int]) -> int:
        return self.images.at(sizes) * self.groups * self.used_results * self.pixels

    def operations(self, sizes: Mapping[str, int]) -> int:
        """Multiply-adds as two operations each."""
        if self.transposed:
            return 2 * self.source_elements(sizes) * self.results * self.taps
        return 2 * self.result_elements(sizes) * self.channels * self.taps


def by_eight(of: Geometry) -> Geometry:
    """The same convolution with rows of weights by eight, where that pays."""
    if of.transposed and of.x.stride > 1:
        return _woven(of) if of.x.stride == 2 and of.x.dilation == 1 else of
    return _spread(of) if of.results in FEW_RESULTS else of


def _spread(of: Geometry) -> Geometry:
    """Eight results and nothing beside them: four warps finish 64 rows of a product, 16 each."""
    row_order = RowOrder(1, of.results, of.x.result, of.x.taps, 0)
    return replace(of, results=-(-of.results // 8) * 16, row_order=row_order)


def _woven(of: Geometry) -> Geometry:
    """A transposed convolution of stride 2 along x as one of stride 1 with twice the results: those
    of even columns and those beside them, by eight of each.

    Column 2·q + r has taps k of the source at q − (k − before − r) / 2: both r read at most one
    place that the other does not.
    """
    x = of.x
    before = (x.before + 1) // 2
    taps = (x.taps - 1 - x.before) // 2 + before + 1
    axis = WindowAxis(x.size, x.positions, taps, 1, 1, before, transposed=True, least=x.least)
    row_order = RowOrder(2, of.results, x.result, x.taps, x.before - 2 * before)
    return replace(of, results=-(-of.results // 8) * 16, x=axis, row_order=row_order)


@dataclass(frozen=True)
class Source:
    """Images in memory; strides in elements along images, channels, z, y and x."""

    buffer: str
    strides: tuple[Dim, Dim, Dim, Dim, Dim]


CHANNELS = 1  # the axis of them, of a source


def lies_along(prologue: LoopKernel, axis: int) -> bool:
    """Whether the largest of what it reads lies side by side along an axis, or nearly so."""
    loads = [item.access for item in prologue.body if isinstance(item, Load)]
    moving = [sum(stride != ZERO for stride in each.strides) for each in loads]
    large = [each for each, axes in zip(loads, moving, strict=True) if axes == max(moving)]
    near = (ONE,) if axis == CHANNELS else (ONE, Dim(2))
    return all(each.strides[axis] in near for each in large)


@dataclass(frozen=True)
class Filter:
    """Weights in memory; strides along groups, their results, channels, z, y and x."""

    buffer: str
    strides: tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class Instead:
    """The pass of PyTorch's own convolution that a kernel stands for: "forward", or the gradient
    by its "input" or "weight". How precise that is the kernel has to be.

    `numbers` are stride, padding, dilation, transposed, output padding and groups.
    """

    which: str
    source: TensorSpec
    weight: TensorSpec
    numbers: tuple[Arg, ...]


@dataclass(frozen=True)
class WindowKernel(Ending):
    """A pointwise epilogue runs over images, results and the axes of a result, in this order.

    One that reduces has the axes that `plan/window_sweeps.py` gives it. A `prologue` runs over
    images, channels and the axes of the source, which it stores: nobody has written that then.
    Into `lines` it leaves its source as halves, which another kernel reads.
    """

    name: str
    summary: str
    geometry: Geometry
    source: Source
    filter: Filter
    epilogue: LoopKernel
    product: str
    instead: Instead
    prologue: LoopKernel | None = None
    lines: str = ""

    def renamed(self, buffers: Mapping[str, str]) -> WindowKernel:
        """The same with operands of other names."""
        buffer = self.source.buffer
        source = replace(self.source, buffer=buffers[buffer] if self.prologue is None else "")
        weights = replace(self.filter, buffer=buffers[self.filter.buffer])
        lines = buffers[self.lines] if self.lines else ""
        return replace(self, source=source, filter=weights, lines=lines)

    @property
    def needs_lines(self) -> bool:
        """Whether lines are what computes its source, or what another kernel waits for."""
        return self.prologue is not None or bool(self.lines)

    @property
    def walked(self) -> Geometry:
        """As tensor cores go about it; what is reduced has results as rows."""
        return by_eight(self.geometry) if self.reduces is Reduces.NOTHING else self.geometry

    @property
    def column_axes(self) -> tuple[int, ...]:
        """A tile has some positions and, of each, the results of some channels.

        Channels, one axis of them or several, step over planes within an image.
        """
        of = self.geometry
        channels = range(of.pixels, of.pixels * of.groups * of.results)
        strides = enumerate(self.given.access.strides)
        return tuple(
            axis for axis, stride in strides if not (stride.is_static and stride.factor in channels)
        )

    @property
    def all_rows(self) -> Dim:
        return Dim(self.geometry.groups * self.geometry.results)

    @property
    def reduces(self) -> Reduces:
        """Columns are positions, rows are results: DOWN is over the results of each position."""
        if not self.epilogue.inner:
            return Reduces.NOTHING
        return Reduces.ACROSS if self.epilogue.inner[-1].name == "x" else Reduces.DOWN

    @property
    def per_image(self) -> bool:
        """Whether images are not reduced."""
        return any(axis.name == "image" for axis in self.epilogue.outer)

    @property
    def together(self) -> int:
        """How many neighbouring results are reduced as one."""
        return next((a.size.factor for a in self.epilogue.inner if a.name == "member"), 1)

    @property
    def operands(self) -> tuple[Argument, ...]:
        given = given_by(self.source, self.prologue)
        return (*given, Argument(self.filter.buffer, "float32", False))

    @property
    def arguments(self) -> tuple[Argument, ...]:
        left = (Argument(self.lines, "uint8", True),) if self.lines else ()
        return (*super().arguments, *left)


def given_by(source: Source, prologue: LoopKernel | None) -> tuple[Argument, ...]:
    """What a source is read from."""
    if prologue is None:
        return (Argument(source.buffer, "float32", False),)
    return tuple(each for each in prologue.arguments if not each.is_output)
