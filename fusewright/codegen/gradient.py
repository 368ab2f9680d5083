"""A convolution's gradient by its weights in C++: its entry, which has no epilogue."""

from __future__ import annotations

from fusewright.codegen.lanes import indented
from fusewright.codegen.source import Entry, Workspace, macro
from fusewright.codegen.text import comment, identifier, size_text, unique_names
from fusewright.codegen.window import axis_text, direct_taps, taps_text
from fusewright.ir import Dim
from fusewright.layout_schedule import GradientSchedule
from fusewright.window import GradientKernel, Source

HEADER, PLANE_HEADER = "sm90_window_gradient.cuh", "plane_gradient.cuh"


def gradient_header(schedule: GradientSchedule) -> str:
    return HEADER if schedule.band_width else PLANE_HEADER


def gradient_entry(kernel: GradientKernel, schedule: GradientSchedule) -> Entry:
    names = tuple(each.name for each in kernel.arguments)
    workspace = Workspace(Dim(4 * schedule.parts * kernel.geometry.filter_elements))
    return Entry(kernel.name, names, kernel.symbols, workspace, "convolutions", kernel.instead)


def gradient_lines(kernel: GradientKernel, schedule: GradientSchedule) -> list[str]:
    of = kernel.geometry
    symbols = unique_names(kernel.symbols)
    given = unique_names((f"{each.name}_ptr" for each in kernel.arguments), symbols.values())
    pointers = {each.name: given[f"{each.name}_ptr"] for each in kernel.arguments}

    def images(source: Source) -> str:
        strides = (size_text(each, symbols) for each in source.strides)
        return ", ".join([f"static_cast<const float*>({pointers[source.buffer]})", *strides])

    weights = [f"static_cast<float*>({pointers[kernel.filter.buffer]})"]
    weights += map(str, kernel.filter.strides[1:])  # results count through all groups
    sizes = [size_text(of.images, symbols), str(of.groups), str(of.channels), str(of.results)]
    sizes += [*map(axis_text, of.axes), str(schedule.band_width)]
    parameters = [f"void* {name}" for name in pointers.values()]
    parameters += [f"int64_t {name}" for name in symbols.values()]
    parameters += ["void* workspace", "int where", "void* stream"]
    title = f"{of.results} x {of.channels} by {taps_text(of)}, {schedule.parts} parts"
    kind, call = "Window", f"window_gradient<{macro('convolutions')}>"
    if not schedule.band_width:
        kind, call = "Plane", f"plane_gradient<{direct_taps(of)}>"
    body = [
        f"const fw::WindowInput source{{{images(kernel.source)}}};",
        f"const fw::WindowInput change{{{images(kernel.change)}}};",
        f"const fw::{kind}Gradient gradient{{{', '.join(weights)}}};",
        f"const fw::ConvolutionSizes sizes{{{', '.join(sizes)}}};",
        f"return fw::{call}(source, change, gradient, sizes, "
        f"{schedule.parts}, workspace, where, stream);",
    ]
    return [
        f"// {identifier(kernel.name)}: {comment(kernel.summary)}",
        f"// {comment(title)}",
        f'extern "C" int {kernel.name}({", ".join(parameters)}) {{',
        *indented(body),
        "}",
    ]
