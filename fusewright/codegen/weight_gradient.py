"""A weight gradient in C++: its entry. It has no epilogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusewright.codegen import convolution
from fusewright.codegen.convolution import images_lines, sizes_lines
from fusewright.codegen.entry import entry_lines, entry_pointers, returned
from fusewright.codegen.equation import convolution_sizes, gradient_equation, told
from fusewright.codegen.form import entry_names
from fusewright.codegen.lanes import indented
from fusewright.codegen.layout import definition
from fusewright.codegen.prologue import computed_lines, prologue_equations, prologue_functor
from fusewright.codegen.source import Rendered, Workspace, macro
from fusewright.codegen.text import size_text
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
        comment=_comment(kernel),
        functors=(prologue_functor(kernel),) if kernel.prologue is not None else (),
        bodies=(kernel.prologue,) if kernel.prologue is not None else (),
        headers=(STAGED_HEADER if kernel.back is not None else header,),
        terms="convolutions",
        instead=kernel.instead,
        options=convolution.options_of(kernel.geometry),
    )


def _comment(kernel: GradientKernel) -> tuple[str, ...]:
    _, pointers = entry_names(kernel)
    names = {key: name.removesuffix("_ptr") for key, name in pointers.items()}
    of, source = kernel.geometry, names[kernel.source.buffer]
    lines, grad_output = [], "grad"
    if kernel.prologue is not None:
        lines = prologue_equations(kernel, grad_output)
    else:
        grad_output = names[kernel.grad_output.buffer]
    lines.append(gradient_equation(of, names[kernel.filter.buffer], source, grad_output))
    return told(kernel, lines, convolution_sizes(of))


def _lines(kernel: GradientKernel, schedule: GradientSchedule) -> list[str]:
    names = _Names(kernel, entry_pointers(kernel))
    lines = indented([*_operands(kernel, schedule, names), *_calls(kernel, schedule, names)])
    return entry_lines(kernel, names.symbols.values(), lines)


class _Names:
    """The C++ names of an entry's arguments and sizes."""

    def __init__(self, kernel: GradientKernel, pointers: Mapping[str, str]) -> None:
        self.symbols, _ = entry_names(kernel)
        self.pointers = pointers

    def size(self, of: Dim) -> str:
        return size_text(of, self.symbols)


def _operands(kernel: GradientKernel, schedule: GradientSchedule, names: _Names) -> list[str]:
    weights = f"fw::Pointer{{{names.pointers[kernel.filter.buffer]}}}"
    strides = ", ".join(map(str, kernel.filter.strides[1:]))  # results count through all groups
    kind = "Weight" if schedule.band_width else "Depthwise"
    if kernel.prologue is not None:
        grad_output = computed_lines(kernel, "grad_output", kernel.geometry.results)
    else:
        grad_output = images_lines("grad_output", kernel.grad_output, names.pointers, names.size)
    return [
        *images_lines("source", kernel.source, names.pointers, names.size),
        *grad_output,
        f"const fw::{kind}Gradient gradient{{{weights}, {strides}}};",
        *sizes_lines("sizes", kernel.geometry, schedule.band_width, names.size),
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
    operands = ["source", "grad_output", "gradient", "sizes"]
    behind = [str(schedule.parts), "workspace"]
    converting = returned(f"fw::{call}", [*operands, *behind, "where", "stream"])
    if kernel.back is None:
        return converting
    back, staged = kernel.back.geometry, names.pointers[kernel.back.staged]
    own = weight_gradient_workspace(kernel, schedule).behind(names.size)
    given = [*operands, "back", *behind, "own", staged, "where", "stream"]
    return [
        f"#if {macro('convolutions')} == 1",
        *sizes_lines("back", back, back.x.positions, names.size, shares_staged=True),
        *definition("void* const own", own),
        *returned(f"fw::staged_gradient<{counts}>", given),
        "#else",
        *converting,
        "#endif",
    ]
