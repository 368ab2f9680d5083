"""A weight gradient in C++: its entry. It has no epilogue."""

from __future__ import annotations

from dataclasses import replace

from fusewright.codegen import convolution
from fusewright.codegen.convolution import images_text, sizes_text
from fusewright.codegen.form import entry_names
from fusewright.codegen.lanes import indented
from fusewright.codegen.prologue import computed_text, prologue_lines
from fusewright.codegen.source import Rendered, Workspace, macro
from fusewright.codegen.text import comment, identifier, size_text
from fusewright.cost.conv_direct import depthwise_gradient_rows
from fusewright.cost.conv_tensor_core import tap_counts
from fusewright.ir.graph import Dim
from fusewright.ir.weight_gradient import GradientKernel
from fusewright.schedule.tensor_core import GradientSchedule

HEADER = "sm90/gradient/sm90_weight_gradient.cuh"
DEPTHWISE_HEADER = "convolution/depthwise_weight_gradient.cuh"
STAGED_HEADER = "sm90/gradient/sm90_staged_weight_gradient.cuh"
WEIGHT = 33


def weight_gradient_workspace(kernel: GradientKernel, schedule: GradientSchedule) -> Workspace:
    """Memory for the sums of all parts, then for the staged input."""
    sums = Workspace(fixed=4 * schedule.parts * kernel.geometry.filter_elements)
    if kernel.back is None:
        return sums
    return replace(sums, rounded=convolution.staged_workspace(kernel.geometry, schedule.band_width))


def render_weight_gradient(kernel: GradientKernel, schedule: GradientSchedule) -> Rendered:
    header = HEADER if schedule.band_width else DEPTHWISE_HEADER
    return Rendered(
        _lines(kernel, schedule),
        WEIGHT,
        names=(kernel.name,),
        bodies=(kernel.prologue,) if kernel.prologue is not None else (),
        headers=(STAGED_HEADER if kernel.back is not None else header,),
        terms="convolutions",
        instead=kernel.instead,
        options=convolution.options_of(kernel.geometry),
    )


def _lines(kernel: GradientKernel, schedule: GradientSchedule) -> list[str]:
    of = kernel.geometry
    names = _Names(kernel)
    parameters = [f"void* {name}" for name in names.pointers.values()]
    parameters += [f"int64_t {name}" for name in names.symbols.values()]
    parameters += ["void* workspace", "int where", "void* stream"]
    title = f"{of.results} x {of.channels} by {convolution.taps_text(of)}, {schedule.parts} parts"
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
    """The C++ names of an entry's arguments and sizes."""

    def __init__(self, kernel: GradientKernel) -> None:
        self.symbols, self.pointers = entry_names(kernel)

    def size(self, of: Dim) -> str:
        return size_text(of, self.symbols)


def _operands(kernel: GradientKernel, schedule: GradientSchedule, names: _Names) -> list[str]:
    weights = [f"static_cast<float*>({names.pointers[kernel.filter.buffer]})"]
    weights += map(str, kernel.filter.strides[1:])  # results count through all groups
    kind = "Weight" if schedule.band_width else "Depthwise"
    sizes = sizes_text(kernel.geometry, schedule.band_width, names.size)
    if kernel.prologue is not None:
        grad_output = f"const auto grad_output = {computed_text(kernel, kernel.geometry.results)};"
    else:
        grad_output = images_text("grad_output", kernel.grad_output, names.pointers, names.size)
    return [
        images_text("source", kernel.source, names.pointers, names.size),
        grad_output,
        f"const fw::{kind}Gradient gradient{{{', '.join(weights)}}};",
        f"const fw::ConvolutionSizes sizes{{{sizes}}};",
    ]


def _calls(kernel: GradientKernel, schedule: GradientSchedule, names: _Names) -> list[str]:
    """The call of the kernel. With one term it reads the staged input that the input's gradient
    has left (`back`)."""
    counts = f"fw::TapCounts<{', '.join(map(str, tap_counts(kernel.geometry)))}>"
    call = f"weight_gradient<{macro('convolutions')}, {counts}>"
    if not schedule.band_width:
        of = kernel.geometry
        taps, rows = convolution.direct_taps(of), depthwise_gradient_rows(of)
        call = f"depthwise_gradient<{taps}, {rows}>"
    behind = f"{schedule.parts}, workspace, where, stream"
    converting = f"return fw::{call}(source, grad_output, gradient, sizes, {behind});"
    if kernel.back is None:
        return [converting]
    back, staged = kernel.back.geometry, names.pointers[kernel.back.staged]
    own = weight_gradient_workspace(kernel, schedule).behind(names.size)
    behind = f"{schedule.parts}, workspace, {own}, {staged}, where, stream"
    sizes = sizes_text(back, back.x.positions, names.size, shares_staged=True)
    return [
        f"#if {macro('convolutions')} == 1",
        f"const fw::ConvolutionSizes back{{{sizes}}};",
        f"return fw::staged_gradient<{counts}>(source, grad_output, gradient, sizes, back, "
        f"{behind});",
        "#else",
        converting,
        "#endif",
    ]
