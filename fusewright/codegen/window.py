"""A convolution in C++: how its entry hands images, weights and sizes to the kernel."""

from __future__ import annotations

from fusewright.codegen.ending import ending_lines, pointer_text
from fusewright.codegen.form import Form
from fusewright.codegen.source import Entry, Workspace, macro
from fusewright.ir import Dim
from fusewright.schedule import WindowSchedule
from fusewright.window import WindowAxis, WindowKernel

HEADER = "sm90_convolution.cuh"


def window_entry(kernel: WindowKernel) -> Entry:
    names = tuple(each.name for each in kernel.arguments)
    workspace = Workspace(Dim(kernel.geometry.workspace_bytes))
    return Entry(kernel.name, names, kernel.symbols, workspace, "convolutions", kernel.instead)


def window_lines(kernel: WindowKernel, form: Form, schedule: WindowSchedule) -> list[str]:
    of, source, filter_ = kernel.geometry, kernel.source, kernel.filter
    title = "transposed " if of.transposed else ""
    title += f"convolution of {of.channels} channels by {of.y.taps} x {of.x.taps} to {of.results}"
    title += f", {of.groups} groups" if of.groups > 1 else ""
    images = [pointer_text(form, "float", source.buffer), *map(form.size, source.strides)]
    weights = pointer_text(form, "float", filter_.buffer)
    filter_numbers = ", ".join(map(str, filter_.strides))
    sizes = [form.size(of.images), str(of.groups), str(of.channels), str(of.results)]
    sizes += [axis_text(of.y), axis_text(of.x), str(schedule.band_width)]
    sizes += ["true" if of.transposed else "false"]
    body = [
        f"const fw::WindowInput source{{{', '.join(images)}}};",
        f"const fw::WindowFilter filter{{{weights}, {filter_numbers}}};",
        f"const fw::ConvolutionSizes sizes{{{', '.join(sizes)}}};",
        f"return fw::convolution<{macro('convolutions')}, {schedule.tile_channels}>(end, "
        "vectors, source, filter, sizes, workspace, where, stream);",
    ]
    return ending_lines(kernel, form, title, body)


def axis_text(axis: WindowAxis) -> str:
    numbers = (axis.size, axis.result, axis.taps, axis.stride, axis.dilation, axis.before)
    return f"{{{', '.join(map(str, numbers))}}}"
