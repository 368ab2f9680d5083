"""A convolution's gradient by its weights in C++: its entry, which has no epilogue."""

from __future__ import annotations

from dataclasses import replace

from fusewright.codegen.convolution import direct_taps, images_text, lines_of, sizes_text, taps_text
from fusewright.codegen.form import entry_names
from fusewright.codegen.lanes import indented
from fusewright.codegen.prologue import computed_text, prologue_lines
from fusewright.codegen.source import Entry, Workspace, macro
from fusewright.codegen.text import comment, identifier, size_text
from fusewright.cost.conv_direct import plane_gradient_rows
from fusewright.cost.conv_tensor_core import tap_counts
from fusewright.ir.graph import Dim
from fusewright.ir.weight_gradient import GradientKernel
from fusewright.schedule.tensor_core import GradientSchedule

HEADER, PLANE_HEADER = (
    "sm90/gradient/sm90_weight_gradient.cuh",
    "convolution/depthwise_weight_gradient.cuh",
)
LINE_HEADER = "sm90/gradient/sm90_staged_weight_gradient.cuh"


def gradient_header(kernel: GradientKernel, schedule: GradientSchedule) -> str:
    if kernel.back is not None:
        return LINE_HEADER
    return HEADER if schedule.band_width else PLANE_HEADER


def gradient_entry(kernel: GradientKernel, schedule: GradientSchedule) -> Entry:
    names = tuple(each.name for each in kernel.arguments)
    workspace = _workspace(kernel, schedule)
    return Entry(kernel.name, names, kernel.symbols, workspace, "convolutions", kernel.instead)


def _workspace(kernel: GradientKernel, schedule: GradientSchedule) -> Workspace:
    """Room for the sums of all parts; behind them for lines of the source."""
    sums = Workspace(fixed=4 * schedule.parts * kernel.geometry.filter_elements)
    if kernel.back is None:
        return sums
    return replace(sums, rounded=lines_of(kernel.geometry, schedule.band_width))


def gradient_lines(kernel: GradientKernel, schedule: GradientSchedule) -> list[str]:
    of = kernel.geometry
    names = _Names(kernel)
    parameters = [f"void* {name}" for name in names.pointers.values()]
    parameters += [f"int64_t {name}" for name in names.symbols.values()]
    parameters += ["void* workspace", "int where", "void* stream"]
    title = f"{of.results} x {of.channels} by {taps_text(of)}, {schedule.parts} parts"
    computed: list[str] = []
    if kernel.prologue is not None:
        computed = ["namespace {", *prologue_lines(kernel), "}  // namespace"]
    return [
        f"// {identifier(kernel.name)}: {comment(kernel.summary)}",
        f"// {comment(title)}",
        *computed,
        f'extern "C" int {kernel.name}({", ".join(parameters)}) {{',
        *indented([*_operands(kernel, schedule, names), *_calls(kernel, schedule, names)]),
        "}",
    ]


class _Names:
    """What an entry calls its arguments and sizes."""

    def __init__(self, kernel: GradientKernel) -> None:
        self.symbols, self.pointers = entry_names(kernel)

    def size(self, of: Dim) -> str:
        return size_text(of, self.symbols)


def _operands(kernel: GradientKernel, schedule: GradientSchedule, names: _Names) -> list[str]:
    weights = [f"static_cast<float*>({names.pointers[kernel.filter.buffer]})"]
    weights += map(str, kernel.filter.strides[1:])  # results count through all groups
    kind = "Window" if schedule.band_width else "Plane"
    sizes = sizes_text(kernel.geometry, schedule.band_width, names.size)
    if kernel.prologue is not None:
        change = f"const auto change = {computed_text(kernel)};"
    else:
        change = images_text("change", kernel.change, names.pointers, names.size)
    return [
        images_text("source", kernel.source, names.pointers, names.size),
        change,
        f"const fw::{kind}Gradient gradient{{{', '.join(weights)}}};",
        f"const fw::ConvolutionSizes sizes{{{sizes}}};",
    ]


def _calls(kernel: GradientKernel, schedule: GradientSchedule, names: _Names) -> list[str]:
    """With one half of each number, from lines that are there."""
    counts = f"fw::TapCounts<{', '.join(map(str, tap_counts(kernel.geometry)))}>"
    call = f"window_gradient<{macro('convolutions')}, {counts}>"
    if not schedule.band_width:
        of = kernel.geometry
        call = f"plane_gradient<{direct_taps(of)}, {plane_gradient_rows(of)}>"
    behind = f"{schedule.parts}, workspace, where, stream"
    converting = f"return fw::{call}(source, change, gradient, sizes, {behind});"
    if kernel.back is None:
        return [converting]
    back, lines = kernel.back.geometry, names.pointers[kernel.back.lines]
    own = _workspace(kernel, schedule).behind(names.size)
    behind = f"{schedule.parts}, workspace, {own}, {lines}, where, stream"
    sizes = sizes_text(back, back.x.positions, names.size, shares_lines=True)
    return [
        f"#if {macro('convolutions')} == 1",
        f"const fw::ConvolutionSizes back{{{sizes}}};",
        f"return fw::line_gradient<{counts}>(source, change, gradient, sizes, back, {behind});",
        "#else",
        converting,
        "#endif",
    ]
