"""A convolution in C++: its entry, which passes images, weights and sizes to the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import takewhile
from math import gcd

from fusewright.codegen.entry import all_of, for_entry, returned
from fusewright.codegen.epilogue import (
    bound_lines_of,
    by_columns,
    end_lines,
    epilogue_forms,
    epilogue_lines,
    pointer,
    pointer_name,
    vectors_tests,
)
from fusewright.codegen.equation import (
    convolution_equation,
    convolution_letters,
    convolution_sizes,
    equations,
    told,
)
from fusewright.codegen.form import Form
from fusewright.codegen.functor import functor
from fusewright.codegen.layout import definition
from fusewright.codegen.prologue import computed_lines, prologue_equations, prologue_functor
from fusewright.codegen.source import ALIGNMENT, Rendered, RoundedWorkspace, Workspace, macro
from fusewright.codegen.split_epilogue import PLANE, reduced, stored
from fusewright.cost.conv_direct import DirectSchedule
from fusewright.cost.conv_staged import staged_memory
from fusewright.cost.conv_tensor_core import MOST_POSITIONS, best_tile_channels, image_positions
from fusewright.ir.convolution import ConvAxis, ConvolutionKernel, ConvSource, Geometry
from fusewright.ir.epilogue import Reduces
from fusewright.ir.graph import ONE, Dim
from fusewright.ir.loop import LoopKernel
from fusewright.schedule.coalesce import merge
from fusewright.schedule.sweeps import part_bytes, sweeps
from fusewright.schedule.tensor_core import ConvolutionSchedule

HEADER = "sm90/convolution/sm90_convolution.cuh"
DIRECT_HEADER = "convolution/direct_convolution.cuh"
DEPTHWISE_HEADER = "convolution/depthwise_convolution.cuh"
# Channels of a group that give one partial: partials_of_group of sm90_implicit_gemm.cuh.
WARP_CHANNELS = 16
PART_POSITIONS = 64  # kPartPositions of position_reductions.cuh
ROW_LANES = 4  # rows are rounded up to a multiple of them (`convolution` of sm90_convolution.cuh)
VECTORS = (4, 2)  # columns
PAIR = 2  # positions that are reduced at once: a thread holds the sums of pairs
WEIGHT, COMPUTED_WEIGHT = 29, 39  # the second with a prologue
# kMostPartials and kFoldedPartials of position_reductions.cuh.
MOST_PARTIALS, FOLDED_PARTIALS = 2048, 256


def convolution_workspace(
    kernel: ConvolutionKernel, schedule: ConvolutionSchedule | DirectSchedule
) -> Workspace:
    if isinstance(schedule, DirectSchedule):
        if not schedule.staged_positions:
            return Workspace()
        schedule = _by_staging(kernel, schedule)
    workspace = _workspace(kernel, schedule)
    if not schedule.staged_positions or kernel.staged:
        return workspace
    return replace(workspace, rounded=staged_workspace(kernel.walked, schedule.band_width))


def render_convolution(
    kernel: ConvolutionKernel, schedule: ConvolutionSchedule | DirectSchedule
) -> Rendered:
    forms, prologue = convolution_forms(kernel), kernel.prologue
    bodies = [form.kernel for form in forms]
    before = () if prologue is None else (prologue_functor(kernel),)
    entry = [for_entry(form, kernel) for form in forms]
    if isinstance(schedule, DirectSchedule):
        lines = _direct_lines(kernel, entry[0], schedule)
        headers = [DIRECT_HEADER if schedule.across else DEPTHWISE_HEADER]
        headers += [HEADER] if schedule.staged_positions else []
    else:
        lines, headers = convolution_lines(kernel, entry, schedule), [HEADER]
    return Rendered(
        lines,
        WEIGHT if prologue is None else COMPUTED_WEIGHT,
        names=tuple(each.name for each in bodies),
        comment=_comment(kernel, forms),
        functors=(*before, *map(functor, forms)),
        bodies=(*bodies, *((prologue,) if prologue is not None else ())),
        headers=tuple(headers),
        terms="convolutions",
        instead=kernel.instead,
        options=options_of(kernel.geometry),
    )


def options_of(of: Geometry) -> Mapping[str, bool]:
    return {"FW_VOLUMES": not of.z.is_single}


def convolution_forms(kernel: ConvolutionKernel) -> tuple[Form, ...]:
    """The forms of the epilogue: first the part that stores elements, then the part that reduces
    over positions."""
    positions, columns = partial(_positions, kernel.geometry), kernel.geometry.x.result
    return epilogue_forms(kernel, _parts(kernel), VECTORS, PAIR, columns, positions)


def _parts(kernel: ConvolutionKernel) -> tuple[LoopKernel, ...]:
    """The loops of the epilogue."""
    epilogue = kernel.epilogue
    if not epilogue.inner:
        return (by_columns(kernel),)
    if kernel.reduces is not Reduces.ACROSS:
        return (epilogue,)
    stores, reduces = stored(epilogue, kernel.accumulator), reduced(epilogue, kernel.accumulator)
    if stores is None:
        return (reduces,)
    stores = merge(by_columns(replace(kernel, epilogue=stores)))
    return replace(stores, name=f"{epilogue.name}_stores"), reduces


def _positions(of: Geometry, epilogue: LoopKernel) -> tuple[str, ...]:
    """A pointwise part's outer indices in terms of image, y and x. They need few divisions, and fit
    into 32 bits."""
    z, y, x = (Dim(axis.result) for axis in of.axes)
    height = of.y.result  # y counts the rows of all z
    ways = {
        (of.images, z, y, x): ("image", f"y / {height}", f"y % {height}", "x"),
        (of.images, z, y * x): ("image", f"y / {height}", f"y % {height} * {of.x.result} + x"),
        (of.images, z * y, x): ("image", "y", "x"),
        (of.images, Dim(of.pixels)): ("image", f"y * {of.x.result} + x"),
    }
    if of.rows == 1:
        ways[of.images, x] = ("image", "x")
    return ways.get(tuple(axis.size for axis in epilogue.outer), ())


def _workspace(kernel: ConvolutionKernel, schedule: ConvolutionSchedule) -> Workspace:
    """Memory for the weights, then for the partials of reductions (`partials_of` in
    sm90_implicit_gemm.cuh counts them)."""
    of, weights = kernel.walked, kernel.walked.workspace_bytes
    if kernel.reduces is Reduces.NOTHING:
        return Workspace(fixed=weights)
    partial = kernel.epilogue.outer_numel * part_bytes(sweeps(kernel.epilogue))
    if kernel.reduces is Reduces.DOWN:
        partials = of.groups * -(-of.results // WARP_CHANNELS)
        return Workspace(partial * partials, fixed=_parts_at(kernel))
    together = kernel.together * len(of.residue_classes)
    laid_out = of.as_staged if schedule.staged_positions else of
    positions = image_positions(laid_out, schedule.band_width)
    if kernel.per_image:
        partials = ((positions + PART_POSITIONS - 2) // PART_POSITIONS + 1) * together
        partials += FOLDED_PARTIALS if partials > MOST_PARTIALS else 0
        return Workspace(partial * partials, fixed=_parts_at(kernel))
    each = partial * (together * MOST_POSITIONS // PART_POSITIONS)
    folded = FOLDED_PARTIALS * partial.factor
    return Workspace(each, of.images * positions, MOST_POSITIONS, _parts_at(kernel) + folded)


def staged_workspace(of: Geometry, band_width: int) -> RoundedWorkspace:
    """Memory for the staged fp16 input: a row for each position, 64 channels and plane."""
    return RoundedWorkspace((staged_memory(of, band_width), Dim(ALIGNMENT)))


def _parts_at(kernel: ConvolutionKernel) -> int:
    return -(-kernel.walked.workspace_bytes // ALIGNMENT) * ALIGNMENT


def convolution_lines(
    kernel: ConvolutionKernel, forms: Sequence[Form], schedule: ConvolutionSchedule
) -> list[str]:
    body = [
        *_operands(kernel, forms[0], kernel.walked, schedule.band_width),
        *_staging_lines(kernel, forms[0]),
        *_convolution_call(kernel, forms, schedule),
    ]
    parts = f"static_cast<char*>(workspace) + {_parts_at(kernel)}"
    parts = "workspace" if kernel.reduces is Reduces.NOTHING else parts
    return epilogue_lines(kernel, forms, _end(kernel, forms, parts), body)


def _end(kernel: ConvolutionKernel, forms: Sequence[Form], parts: str) -> list[str]:
    if kernel.reduces is not Reduces.ACROSS:
        return end_lines(forms[0], parts)
    *stores, reduces = forms
    lines, first = [], "fw::Nothing{}"
    if stores:
        lines, first = bound_lines_of(stores[0], "ByColumn", "stored", "nullptr"), "stored"
    planes = reduces.kernel.inner[-1].name == PLANE
    flags = (str(each).lower() for each in (kernel.per_image, kernel.together, planes))
    constants = "".join(f", {each}" for each in flags)
    lines += bound_lines_of(reduces, "ByChannel", "reduced", parts, constants)
    return [*lines, f"const fw::StoredAndReduced end{{{first}, reduced}};"]


def _staging_lines(kernel: ConvolutionKernel, form: Form) -> list[str]:
    """Statements that write the shared staged input even if the result is not wanted, or is
    computed without it."""
    if not kernel.staged:
        return []
    given = ["source", "sizes", form.pointers[kernel.staged], "where", "stream"]
    results = [form.pointers[each.name] for each in kernel.epilogue.arguments if each.is_output]
    unwanted = all_of("unwanted", [f"{name} == nullptr" for name in results])
    other = [f"const int code = fw::stage_input({', '.join(given)});"]
    other += ["if (code != 0) return code;"]
    chosen = f"#if {macro('convolutions')} != 1"
    staged = returned("fw::stage_input", given, ["unwanted"])
    return [*unwanted, *staged, chosen, *other, "#endif"]


def _convolution_call(
    kernel: ConvolutionKernel, forms: Sequence[Form], schedule: ConvolutionSchedule
) -> list[str]:
    form = forms[0]
    template = f"{macro('convolutions')}, {_way(kernel, schedule)}, {form.schedule.lanes}"
    if goes_by_lanes(kernel, forms, schedule.band_width):
        template += ", true"
    staged = form.pointers[kernel.staged] if kernel.staged else "nullptr"
    if schedule.staged_positions and not kernel.staged:
        staged = _workspace(kernel, schedule).behind(form.size)
    lines = []
    if staged != "nullptr":
        lines, staged = definition("void* const staged", staged), "staged"
    given = ["end", "vectors", "source", "filter", "sizes", "workspace", staged]
    return [*lines, *returned(f"fw::convolution<{template}>", [*given, "where", "stream"])]


def goes_by_lanes(kernel: ConvolutionKernel, forms: Sequence[Form], band_width: int) -> bool:
    """Whether the epilogue always processes positions in vectors: it reads no tensor that may be
    unaligned, and it writes new memory."""
    new = {each.name for each in kernel.arguments if each.is_output}
    lanes, aligned = forms[0].schedule.lanes, vectors_tests(kernel, forms, new) == []
    return lanes > 1 and aligned and lanes_of_rows(kernel.walked, band_width) % lanes == 0


def lanes_of_rows(of: Geometry, band_width: int) -> int:
    """The number of lanes of which an output row has a multiple, and at whose multiples it begins.
    Such lanes fulfil `goes_by_lanes` of kernels/sm90/convolution/sm90_implicit_gemm.cuh."""
    columns, results = 1, of.x.result
    if of.row_order is not None:
        columns, results = 2 if of.row_order.beside == 2 else 1, of.row_order.columns
    elif of.transposed and of.x.stride > 1:
        return 1  # The outputs of a residue class are not contiguous.
    # Rows are rounded up to a common divisor of lanes and bands.
    return gcd(results, columns * gcd(band_width, ROW_LANES))


def _way(kernel: ConvolutionKernel, schedule: ConvolutionSchedule) -> str:
    name = "PingPong" if schedule.ping_pong else "ByTiles"
    name = "ByStagedInput" if schedule.staged_positions else name
    order = kernel.walked.row_order
    constants = (schedule.tile_channels, schedule.staged_positions, order.beside if order else 0)
    return f"fw::{name}<{', '.join(str(each) for each in constants if each)}>"


def _comment(kernel: ConvolutionKernel, forms: Sequence[Form]) -> tuple[str, ...]:
    of, names = kernel.geometry, forms[0].names
    source = "source" if kernel.prologue else pointer_name(forms[0], kernel.source.buffer)
    weights, result = pointer_name(forms[0], kernel.filter.buffer), names[kernel.accumulator]
    before = [] if kernel.prologue is None else prologue_equations(kernel)
    lines = [*before, convolution_equation(of, result, source, weights)]
    for form in forms:
        lines += equations(form, result, convolution_letters(form))
    return told(kernel, list(dict.fromkeys(lines)), convolution_sizes(of))


def _operands(kernel: ConvolutionKernel, form: Form, of: Geometry, band_width: int) -> list[str]:
    """Definitions of the images, the weights and the sizes."""
    weights = ", ".join(map(str, kernel.filter.strides))
    sizes = sizes_lines("sizes", of, band_width, form.size, bool(kernel.staged))
    if kernel.prologue is not None:
        source = computed_lines(kernel, "source", kernel.geometry.channels)
    else:
        source = images_lines("source", kernel.source, form.pointers, form.size)
    return [
        *source,
        f"const fw::ConvFilter filter{{{pointer(form, kernel.filter.buffer)}, {weights}}};",
        *sizes,
    ]


def images_lines(
    name: str, source: ConvSource, pointers: Mapping[str, str], size: Callable[[Dim], str]
) -> list[str]:
    """The definition of a tensor of images. Its type says whether channels may be contiguous."""
    data = f"fw::Pointer{{{pointers[source.buffer]}}}"
    images = ", ".join([data, *map(size, source.strides)])
    if source.strides[1].is_static and source.strides[1] != ONE:
        return [f"const fw::PlanarInput {name}{{{{{images}}}}};"]
    return [f"const fw::ConvInput {name}{{{images}}};"]


def sizes_lines(
    name: str,
    of: Geometry,
    band_width: int,
    size: Callable[[Dim], str],
    shares_staged: bool = False,
) -> list[str]:
    """The definition of a ConvolutionSizes, and of its axes. `size` writes a size as C++."""
    axes = dict.fromkeys(map(axis_text, of.axes))
    prefix = "" if name == "sizes" else f"{name[0]}_"
    named = {axis: f"{prefix}{letter}" for axis, letter in zip(axes, "zyx", strict=False)}
    sizes = [size(of.images), str(of.groups), str(of.channels), str(of.results)]
    sizes += [named[axis_text(axis)] for axis in of.axes]
    sizes += [str(band_width), "true" if of.transposed else "false"]
    order = []
    if of.row_order:
        constants = ", ".join(map(str, astuple(of.row_order)))
        order = [f"const fw::RowOrder {prefix}order{{{constants}}};"]
    if of.row_order or shares_staged:
        sizes += [f"{prefix}order" if of.row_order else "{}"]
    sizes += ["true"] if shares_staged else []
    return [
        *(f"const fw::ConvAxis {each}{axis};" for axis, each in named.items()),
        *order,
        f"const fw::ConvolutionSizes {name}{{{', '.join(sizes)}}};",
    ]


def _direct_lines(kernel: ConvolutionKernel, form: Form, schedule: DirectSchedule) -> list[str]:
    of = kernel.geometry
    name, tile = "direct_convolution", f"{schedule.outs}, {schedule.rows}, {schedule.across}"
    if not schedule.across:
        name, tile = "depthwise_convolution", str(schedule.rows)
        if of.transposed and of.strided:
            phases = (axis.before % axis.stride for axis in (of.y, of.x))
            name, tile = "depthwise_transposed", ", ".join(map(str, (schedule.rows, *phases)))
    call = f"fw::{name}<{macro('convolutions')}, {direct_taps(of)}, {tile}>"
    operands = _operands(kernel, form, of, of.x.result)
    sums = returned(call, ["end", "source", "filter", "sizes", "where", "stream"])
    if not schedule.staged_positions:
        return epilogue_lines(kernel, (form,), end_lines(form), [*operands, *sums])
    cores = _operands(kernel, form, kernel.walked, kernel.walked.x.result)
    cores += _convolution_call(kernel, (form,), _by_staging(kernel, schedule))
    pairs = zip(operands, cores, strict=False)
    same = [line for line, _ in takewhile(lambda each: each[0] == each[1], pairs)]
    chosen = f"#if {macro('convolutions')} == 1"
    others, more = cores[len(same) :], operands[len(same) :]
    body = [*same, chosen, *others, "#else", *more, *sums, "#endif"]
    return epilogue_lines(kernel, (form,), end_lines(form), body)


def _by_staging(kernel: ConvolutionKernel, schedule: DirectSchedule) -> ConvolutionSchedule:
    of, positions = kernel.walked, schedule.staged_positions
    return ConvolutionSchedule(best_tile_channels(of), of.x.result, staged_positions=positions)


def direct_taps(of: Geometry) -> str:
    y, x = of.y, of.x
    taps = (y.taps, x.taps, y.stride, x.stride, y.dilation, x.dilation)
    return f"fw::DirectTaps<{', '.join(map(str, taps))}>"


def axis_text(axis: ConvAxis) -> str:
    constants = [axis.size, axis.result, axis.taps, axis.stride, axis.dilation, axis.before]
    constants += [axis.least] if axis.least else []
    return f"{{{', '.join(map(str, constants))}}}"
