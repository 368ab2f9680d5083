"""The description of one convolution and its epilogue.

    result[n, o, y, x] = Σ source[n, c, y·stride − before + j·dilation, …] · weights[o, c, j, i]

The sum runs over the channels c and taps (j, i) of the group that o belongs to; the source is zero
outside its bounds. A third axis z comes before y; 2-d images have a single z, 1-d images a single
row. A transposed convolution, and the input gradient of a convolution, is the reverse:

    result[n, o, y·stride − before + j·dilation, …] = Σ source[n, c, y, x] · weights[o, c, j, i]

Results whose positions have the same remainders by the stride are a residue class: a convolution of
stride 1 with the taps of that class. Neighbours in a class are not neighbours in memory. With a
stride of 2 along x, both classes are interleaved instead, see `by_eight`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fusewright.ir.epilogue import Reduces, WithEpilogue
from fusewright.ir.graph import ONE, ZERO, Arg, Dim, TensorSpec
from fusewright.ir.loop import Argument, Load, LoopKernel

# output channels of a group: without `by_eight`, only two warps would run the epilogue
FEW_RESULTS = range(9, 33)


@dataclass(frozen=True)
class ConvAxis:
    """One spatial axis of a convolution."""

    size: int
    result: int
    taps: int
    stride: int
    dilation: int
    before: int
    transposed: bool = False
    one_plane: bool = False  # of the source, read by all residue classes
    least: int = 0  # lower bound of the extent, to equal another axis's

    @property
    def positions(self) -> int:
        """Results along the axis, or those of the largest residue class."""
        return -(-self.result // self.stride) if self.transposed else self.result

    @property
    def halo(self) -> int:
        """How many positions beyond its own the farthest tap reads."""
        if not self.transposed:
            return (self.taps - 1) * self.dilation // self.stride
        if self.one_plane:
            far = (self.taps - 1) * self.dilation - self.before
            return far // self.stride - -self.before // self.stride
        common = math.gcd(self.stride, self.dilation)
        return (max(self.phases) - 1) * self.dilation // common

    @property
    def extent(self) -> int:
        """Positions between the starts of two rows, or planes. The zeros after one row may be those
        before the next; see `extent` of kernels/convolution/taps.cuh."""
        every = self.positions + self.halo
        if self.stride > 1:
            return max(every, self.least)
        before = self.halo - self.before if self.transposed else self.before
        return max(min(every, max(self.result, self.size + before, every - before)), self.least)

    @property
    def deep(self) -> int:
        """The same along z, where only a staged input has halos."""
        return self.extent if self.one_plane else self.positions

    @property
    def is_single(self) -> bool:
        """Whether the axis is trivial: one position, one tap, no stride and no padding."""
        numbers = (self.size, self.result, self.taps, self.stride, self.before)
        return numbers == (1, 1, 1, 1, 0)

    @property
    def phases(self) -> tuple[int, ...]:
        """Taps per remainder of tap · dilation by the stride; if transposed, per residue class."""
        first = self.before if self.transposed else 0
        found = [0] * self.stride
        for tap in range(self.taps):
            found[(tap * self.dilation - first) % self.stride] += 1
        return tuple(taps for taps in found if taps or self.transposed)


SINGLE = ConvAxis(1, 1, 1, 1, 1, 0)


@dataclass(frozen=True)
class RowOrder:
    """The row order of a convolution with weights by eight; RowOrder of
    kernels/convolution/operands.cuh."""

    beside: int  # columns that one position computes
    results: int  # output channels of a group
    columns: int
    taps: int  # along x
    first: int  # which original tap is the first one for even columns


@dataclass(frozen=True)
class Geometry:
    """The sizes of a convolution; `channels` and `results` are a group's input and output
    channels."""

    images: Dim
    groups: int
    channels: int
    results: int
    y: ConvAxis
    x: ConvAxis
    row_order: RowOrder | None = None
    z: ConvAxis = SINGLE

    @property
    def axes(self) -> tuple[ConvAxis, ConvAxis, ConvAxis]:
        return self.z, self.y, self.x

    @property
    def taps(self) -> int:
        return math.prod(axis.taps for axis in self.axes)

    @property
    def pixels(self) -> int:
        """Pixels of the result, per image."""
        return math.prod(axis.result for axis in self.axes)

    @property
    def rows(self) -> int:
        """Rows of the result, over all z."""
        return self.z.result * self.y.result

    @property
    def has_rows_and_columns(self) -> bool:
        """Whether the result may have several channels and several positions."""
        many = self.pixels > 1 or self.images != ONE
        return self.groups * self.results > 1 and many

    @property
    def transposed(self) -> bool:
        return self.x.transposed

    @property
    def strided(self) -> bool:
        return math.prod(axis.stride for axis in self.axes) > 1

    @property
    def as_staged(self) -> Geometry:
        """With a staged input: all residue classes read one plane, and z has halos, too."""
        z, y, x = (replace(axis, one_plane=True) for axis in self.axes)
        return replace(self, z=z, y=y, x=x)

    @property
    def input_gradient(self) -> Geometry:
        """The transposed convolution that is the input gradient of this one."""
        z, y, x = (
            replace(axis, size=axis.result, result=axis.size, transposed=True) for axis in self.axes
        )
        return replace(self, channels=self.results, results=self.channels, z=z, y=y, x=x)

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.row_order.columns if self.row_order else self.x.result

    @property
    def used_results(self) -> int:
        """Output channels without padding, one for each column of a position."""
        return self.row_order.results * self.row_order.beside if self.row_order else self.results

    @property
    def phases(self) -> tuple[int, ...]:
        """The taps that are read together: those of one z and one pair of remainders."""
        return tuple(taps for each in self.residue_classes for taps in each)

    @property
    def residue_classes(self) -> tuple[tuple[int, ...], ...]:
        """The phases of each residue class; there is one class unless this is transposed."""
        planes = [y * x for y in self.y.phases for x in self.x.phases]
        if not self.transposed:
            return (tuple(planes * self.z.taps),)
        return tuple((taps,) * z if taps else () for z in self.z.phases for taps in planes)

    @property
    def planes(self) -> int:
        """Planes of a staged input: one for all residue classes, or one for each remainder."""
        return 1 if self.transposed else math.prod(len(axis.phases) for axis in self.axes)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the weights' high and low parts and of a scale for each output channel.

        Weights are stored in boxes of 64: all 64 channels of a tap or, for the remaining channels,
        16 channels of four taps of a phase, and so on.
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
        """Multiply-adds count as two operations."""
        if self.transposed:
            return 2 * self.source_elements(sizes) * self.results * self.taps
        return 2 * self.result_elements(sizes) * self.channels * self.taps


def by_eight(of: Geometry) -> Geometry:
    """The same convolution with rows of weights in groups of eight, if that pays."""
    if of.transposed and of.x.stride > 1:
        return _woven(of) if of.x.stride == 2 and of.x.dilation == 1 else of
    return _spread(of) if of.results in FEW_RESULTS else of


def _spread(of: Geometry) -> Geometry:
    """Spread the output channels: eight rows of weights, then eight empty ones. Four warps then run
    the epilogue of 64 rows, 16 each."""
    row_order = RowOrder(1, of.results, of.x.result, of.x.taps, 0)
    return replace(of, results=-(-of.results // 8) * 16, row_order=row_order)


def _woven(of: Geometry) -> Geometry:
    """A transposed convolution of stride 2 along x as one of stride 1 with twice the output
    channels: eight for even columns, then eight for the odd columns next to them.

    Column 2·q + r reads the source at q − (k − before − r) / 2 for taps k; each r reads at most one
    position that the other does not.
    """
    x = of.x
    before = (x.before + 1) // 2
    taps = (x.taps - 1 - x.before) // 2 + before + 1
    axis = ConvAxis(x.size, x.positions, taps, 1, 1, before, transposed=True, least=x.least)
    row_order = RowOrder(2, of.results, x.result, x.taps, x.before - 2 * before)
    return replace(of, results=-(-of.results // 8) * 16, x=axis, row_order=row_order)


@dataclass(frozen=True)
class ConvSource:
    """Images in memory; strides in elements along images, channels, z, y and x."""

    buffer: str
    strides: tuple[Dim, Dim, Dim, Dim, Dim]


CHANNELS = 1  # the channel axis of a source


def is_contiguous_along(prologue: LoopKernel, axis: int) -> bool:
    """Whether the largest tensors that a prologue reads are contiguous along an axis, or nearly."""
    loads = [item.access for item in prologue.body if isinstance(item, Load)]
    moving = [sum(stride != ZERO for stride in each.strides) for each in loads]
    large = [each for each, axes in zip(loads, moving, strict=True) if axes == max(moving)]
    near = (ONE,) if axis == CHANNELS else (ONE, Dim(2))
    return all(each.strides[axis] in near for each in large)


@dataclass(frozen=True)
class ConvFilter:
    """Weights in memory; strides along groups, output channels, input channels, z, y and x."""

    buffer: str
    strides: tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class LibraryPass:
    """The pass of PyTorch's convolution that a kernel replaces: "forward", or the gradient of its
    "input" or "weight". The kernel must be as precise as that pass.

    `numbers` are stride, padding, dilation, transposed, output padding and groups.
    """

    which: str
    source: TensorSpec
    weight: TensorSpec
    numbers: tuple[Arg, ...]


@dataclass(frozen=True)
class ConvolutionKernel(WithEpilogue):
    """A pointwise epilogue runs over images, output channels and the spatial axes, in this order.

    An epilogue that reduces has the axes that plan/convolution_reductions.py gives it. A `prologue`
    runs over images, channels and the spatial axes of the source, and computes the source, which is
    then not in memory. The kernel leaves its fp16 staged input in `staged`, for another kernel.
    """

    geometry: Geometry
    source: ConvSource
    filter: ConvFilter
    instead: LibraryPass
    prologue: LoopKernel | None = None
    staged: str = ""
    kind: ClassVar[str] = "convolution"

    def renamed(self, buffers: Mapping[str, str]) -> ConvolutionKernel:
        """The same kernel with other operand names."""
        buffer = self.source.buffer
        source = replace(self.source, buffer=buffers[buffer] if self.prologue is None else "")
        weights = replace(self.filter, buffer=buffers[self.filter.buffer])
        staged = buffers[self.staged] if self.staged else ""
        prologue = under(self.prologue, buffers)
        return replace(self, source=source, filter=weights, staged=staged, prologue=prologue)

    def operand_bytes(self, sizes: Mapping[str, int], held: Mapping[str, int]) -> int:
        source = 4 * self.geometry.source_elements(sizes)
        if self.prologue is not None:
            source = self.prologue.bytes_moved(sizes, held) - source
        return source + 4 * self.geometry.filter_elements

    def own_operations(self, sizes: Mapping[str, int]) -> int:
        before = 0 if self.prologue is None else self.prologue.operations(sizes)
        return self.geometry.operations(sizes) + before

    @property
    def needs_staging(self) -> bool:
        """Whether it needs a staged input: a prologue computes it, or another kernel reads it."""
        return self.prologue is not None or bool(self.staged)

    @property
    def walked(self) -> Geometry:
        """The geometry on tensor cores; with a reduction, rows are plain output channels."""
        return by_eight(self.geometry) if self.reduces is Reduces.NOTHING else self.geometry

    @property
    def column_axes(self) -> tuple[int, ...]:
        """A tile has some positions, and the results of some channels for each.

        Channels, on one axis or several, step over planes within an image.
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
        """Columns are positions, rows are output channels: DOWN reduces a position's channels."""
        if not self.epilogue.inner:
            return Reduces.NOTHING
        return Reduces.ACROSS if self.epilogue.inner[-1].name == "x" else Reduces.DOWN

    @property
    def per_image(self) -> bool:
        """Whether each image is reduced separately."""
        return any(axis.name == "image" for axis in self.epilogue.outer)

    @property
    def together(self) -> int:
        """How many neighbouring output channels are reduced together."""
        return next((a.size.factor for a in self.epilogue.inner if a.name == "member"), 1)

    @property
    def operands(self) -> tuple[Argument, ...]:
        given = given_by(self.source, self.prologue)
        return (*given, Argument(self.filter.buffer, "float32", False))

    @property
    def arguments(self) -> tuple[Argument, ...]:
        left = (Argument(self.staged, "uint8", True),) if self.staged else ()
        return (*super().arguments, *left)


def given_by(source: ConvSource, prologue: LoopKernel | None) -> tuple[Argument, ...]:
    """The arguments from which a source is read or computed."""
    if prologue is None:
        return (Argument(source.buffer, "float32", False),)
    return tuple(each for each in prologue.arguments if not each.is_output)


def under(prologue: LoopKernel | None, buffers: Mapping[str, str]) -> LoopKernel | None:
    """A prologue with these buffer names."""
    if prologue is None:
        return None
    (computed,) = (each.name for each in prologue.arguments if each.is_output)
    return prologue.under({**buffers, computed: "computed"})
