"""A convolution in C++: how its entry hands images, weights and sizes to the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from math import gcd

from fusewright.codegen.epilogue import ending_lines, pointer_text, vectors_text
from fusewright.codegen.form import Form
from fusewright.codegen.prologue import computed_text, prologue_lines
from fusewright.codegen.source import ALIGNMENT, Entry, Rounded, Workspace, macro
from fusewright.cost.conv_direct import DirectSchedule
from fusewright.cost.conv_staged import line_memory
from fusewright.cost.conv_tensor_core import MOST_POSITIONS, best_tile_channels, image_positions
from fusewright.ir.convolution import Geometry, Source, WindowAxis, WindowKernel
from fusewright.ir.epilogue import Reduces
from fusewright.ir.graph import ONE, Dim
from fusewright.schedule.sweeps import part_bytes, sweeps
from fusewright.schedule.tensor_core import WindowSchedule

HEADER, DIRECT_HEADER = (
    "sm90/convolution/sm90_convolution.cuh",
    "convolution/direct_convolution.cuh",
)
PLANE_HEADER = "convolution/depthwise_convolution.cuh"
WARP_CHANNELS = (
    16  # of a group, that leave a part together: lines_of_group of sm90_implicit_gemm.cuh
)
PART_POSITIONS = 64  # kPartPositions of position_reductions.cuh
ROW_LANES = 4  # that `convolution` of sm90_convolution.cuh has rows laid out for
MOST_LINES, FOLDED_LINES = 2048, 256  # kMostLines and kFoldedLines of position_reductions.cuh


def window_entry(kernel: WindowKernel, schedule: WindowSchedule) -> Entry:
    names = tuple(each.name for each in kernel.arguments)
    workspace = _workspace(kernel, schedule)
    if schedule.line_positions and not kernel.lines:
        lines = lines_of(kernel.walked, schedule.band_width)
        workspace = replace(workspace, rounded=lines)
    return Entry(kernel.name, names, kernel.symbols, workspace, "convolutions", kernel.instead)


def _workspace(kernel: WindowKernel, schedule: WindowSchedule) -> Workspace:
    """The weights, and after them room for what tiles have reduced; `lines_of` in sm90_implicit_gemm.cuh
    says how many lines of it there are."""
    of, weights = kernel.walked, kernel.walked.workspace_bytes
    if kernel.reduces is Reduces.NOTHING:
        return Workspace(fixed=weights)
    line = kernel.epilogue.outer_numel * part_bytes(sweeps(kernel.epilogue))
    if kernel.reduces is Reduces.DOWN:
        lines = of.groups * -(-of.results // WARP_CHANNELS)
        return Workspace(line * lines, fixed=_parts_at(kernel))
    together = kernel.together * len(of.classes)
    laid_out = of.in_lines if schedule.line_positions else of
    positions = image_positions(laid_out, schedule.band_width)
    if kernel.per_image:
        lines = ((positions + PART_POSITIONS - 2) // PART_POSITIONS + 1) * together
        lines += FOLDED_LINES if lines > MOST_LINES else 0
        return Workspace(line * lines, fixed=_parts_at(kernel))
    each = line * (together * MOST_POSITIONS // PART_POSITIONS)
    folded = FOLDED_LINES * line.factor
    return Workspace(each, of.images * positions, MOST_POSITIONS, _parts_at(kernel) + folded)


def lines_of(of: Geometry, band_width: int) -> Rounded:
    """Room for the input as halves: a row for each position, 64 channels and plane."""
    return Rounded((line_memory(of, band_width), Dim(ALIGNMENT)))


def _parts_at(kernel: WindowKernel) -> int:
    return -(-kernel.walked.workspace_bytes // ALIGNMENT) * ALIGNMENT


def window_lines(
    kernel: WindowKernel, forms: Sequence[Form], schedule: WindowSchedule
) -> list[str]:
    body = [
        *_operands(kernel, forms[0], kernel.walked, schedule.band_width),
        *_left_lines(kernel, forms[0]),
        _window_call(kernel, forms, schedule),
    ]
    parts = f"static_cast<char*>(workspace) + {_parts_at(kernel)}"
    parts = "workspace" if kernel.reduces is Reduces.NOTHING else parts
    before = [] if kernel.prologue is None else prologue_lines(kernel)
    return ending_lines(kernel, forms, _title(kernel), body, parts, before)


def _left_lines(kernel: WindowKernel, form: Form) -> list[str]:
    """Where nobody wants the result, or it is made in another way, lines are left all the same."""
    if not kernel.lines:
        return []
    left = f"fw::leave_lines(source, sizes, {form.pointers[kernel.lines]}, where, stream)"
    results = [form.pointers[each.name] for each in kernel.epilogue.arguments if each.is_output]
    unwanted = " && ".join(f"{name} == nullptr" for name in results)
    other = [f"const int code = {left};", "if (code != 0) return code;"]
    chosen = f"#if {macro('convolutions')} != 1"
    return [f"if ({unwanted}) return {left};", chosen, *other, "#endif"]


def _window_call(kernel: WindowKernel, forms: Sequence[Form], schedule: WindowSchedule) -> str:
    form = forms[0]
    template = f"{macro('convolutions')}, {_way(kernel, schedule)}, {form.schedule.lanes}"
    if goes_by_lanes(kernel, forms, schedule.band_width):
        template += ", true"
    lines = _workspace(kernel, schedule).behind(form.size) if schedule.line_positions else "nullptr"
    lines = form.pointers[kernel.lines] if kernel.lines else lines
    return (
        f"return fw::convolution<{template}>(end, vectors, source, filter, sizes, workspace, "
        f"{lines}, where, stream);"
    )


def goes_by_lanes(kernel: WindowKernel, forms: Sequence[Form], band_width: int) -> bool:
    """Whether positions always go through the epilogue by lanes: it reads no tensor that may begin
    anywhere, and what it writes is new memory."""
    new = {each.name for each in kernel.arguments if each.is_output}
    lanes, aligned = forms[0].schedule.lanes, vectors_text(kernel, forms, new) == "true"
    return lanes > 1 and aligned and lanes_of_rows(kernel.walked, band_width) % lanes == 0


def lanes_of_rows(of: Geometry, band_width: int) -> int:
    """Rows of results are so many at a time, and begin at multiples of that; such lanes pass
    `goes_by_lanes` of kernels/sm90/convolution/sm90_implicit_gemm.cuh."""
    columns, results = 1, of.x.result
    if of.row_order is not None:
        columns, results = 2 if of.row_order.beside == 2 else 1, of.row_order.columns
    elif of.transposed and of.x.stride > 1:
        return 1  # those of a class lie apart
    # Rows are rounded up to what lanes and bands have in common.
    return gcd(results, columns * gcd(band_width, ROW_LANES))


def _way(kernel: WindowKernel, schedule: WindowSchedule) -> str:
    name = "ByLines" if schedule.line_positions else "InTurns" if schedule.turns else "ByTiles"
    row_order = kernel.walked.row_order
    numbers = (
        schedule.tile_channels,
        schedule.line_positions,
        row_order.beside if row_order else 0,
    )
    return f"fw::{name}<{', '.join(str(each) for each in numbers if each)}>"


def _title(kernel: WindowKernel) -> str:
    of = kernel.geometry
    title = "transposed " if of.transposed else ""
    title += f"convolution of {of.channels} channels by {taps_text(of)} to {of.results}"
    return title + (f", {of.groups} groups" if of.groups > 1 else "")


def _operands(kernel: WindowKernel, form: Form, of: Geometry, band_width: int) -> list[str]:
    """Images, weights and sizes."""
    source, filter_ = kernel.source, kernel.filter
    weights = pointer_text(form, "float", filter_.buffer)
    filter_numbers = ", ".join(map(str, filter_.strides))
    sizes = sizes_text(of, band_width, form.size, bool(kernel.lines))
    if kernel.prologue is not None:
        given = f"const auto source = {computed_text(kernel)};"
    else:
        given = images_text("source", source, form.pointers, form.size)
    return [
        given,
        f"const fw::WindowFilter filter{{{weights}, {filter_numbers}}};",
        f"const fw::ConvolutionSizes sizes{{{sizes}}};",
    ]


def images_text(
    name: str, source: Source, pointers: Mapping[str, str], size: Callable[[Dim], str]
) -> str:
    """A tensor of images, and whether its channels may lie side by side."""
    data = f"static_cast<const float*>({pointers[source.buffer]})"
    images = ", ".join([data, *map(size, source.strides)])
    if source.strides[1].is_static and source.strides[1] != ONE:
        return f"const fw::PlanarInput {name}{{{{{images}}}}};"
    return f"const fw::WindowInput {name}{{{images}}};"


def sizes_text(
    of: Geometry, band_width: int, size: Callable[[Dim], str], shares_lines: bool = False
) -> str:
    """ConvolutionSizes; `size` says how a size is written."""
    sizes = [size(of.images), str(of.groups), str(of.channels), str(of.results)]
    sizes += [*map(axis_text, of.axes), str(band_width)]
    sizes += ["true" if of.transposed else "false"]
    if of.row_order or shares_lines:
        numbers = astuple(of.row_order) if of.row_order else ()
        sizes += [f"{{{', '.join(map(str, numbers))}}}"]
    return ", ".join([*sizes, "true"] if shares_lines else sizes)


def direct_header(schedule: DirectSchedule) -> str:
    return DIRECT_HEADER if schedule.across else PLANE_HEADER


def direct_entry(kernel: WindowKernel, schedule: DirectSchedule) -> Entry:
    if schedule.line_positions:
        return window_entry(kernel, _by_lines(kernel, schedule))
    names = tuple(each.name for each in kernel.arguments)
    workspace = Workspace()
    return Entry(kernel.name, names, kernel.symbols, workspace, "convolutions", kernel.instead)


def direct_lines(kernel: WindowKernel, form: Form, schedule: DirectSchedule) -> list[str]:
    of = kernel.geometry
    name, tile = "direct_convolution", f"{schedule.outs}, {schedule.rows}, {schedule.across}"
    if not schedule.across:
        name, tile = "plane_convolution", str(schedule.rows)
        if of.transposed and of.strided:
            phases = (axis.before % axis.stride for axis in (of.y, of.x))
            name, tile = "gathered_planes", ", ".join(map(str, (schedule.rows, *phases)))
    call = f"fw::{name}<{macro('convolutions')}, {direct_taps(of)}, {tile}>"
    operands = _operands(kernel, form, of, of.x.result)
    sums = f"return {call}(end, source, filter, sizes, where, stream);"
    if not schedule.line_positions:
        return ending_lines(kernel, (form,), _title(kernel), [*operands, sums])
    cores = _operands(kernel, form, kernel.walked, kernel.walked.x.result)
    cores += [_window_call(kernel, (form,), _by_lines(kernel, schedule))]
    chosen = f"#if {macro('convolutions')} == 1"
    body = [chosen, *cores, "#else", *operands, sums, "#endif"]
    return ending_lines(kernel, (form,), _title(kernel), body)


def _by_lines(kernel: WindowKernel, schedule: DirectSchedule) -> WindowSchedule:
    of, positions = kernel.walked, schedule.line_positions
    return WindowSchedule(best_tile_channels(of), of.x.result, line_positions=positions)


def direct_taps(of: Geometry) -> str:
    y, x = of.y, of.x
    taps = (y.taps, x.taps, y.stride, x.stride, y.dilation, x.dilation)
    return f"fw::DirectTaps<{', '.join(map(str, taps))}>"


def taps_text(of: Geometry) -> str:
    axes = of.axes if of.z.taps > 1 else of.axes[1:]
    return " x ".join(str(axis.taps) for axis in axes)


def axis_text(axis: WindowAxis) -> str:
    numbers = [axis.size, axis.result, axis.taps, axis.stride, axis.dilation, axis.before]
    numbers += [axis.least] if axis.least else []
    return f"{{{', '.join(map(str, numbers))}}}"
