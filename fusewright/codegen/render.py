"""`render`: kernels and their schedules → one translation unit.

The needed files of `kernels/` are pasted in front, each once, so that the text includes nothing
but the standard toolchain. The same kernels give the same text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from fusewright.codegen.body import functor
from fusewright.codegen.convolution import HEADER as WINDOW_HEADER
from fusewright.codegen.convolution import (
    direct_entry,
    direct_header,
    direct_lines,
    window_entry,
    window_lines,
)
from fusewright.codegen.entry import bind, entry, function
from fusewright.codegen.epilogue import Ended, ending_forms
from fusewright.codegen.form import Form, form
from fusewright.codegen.matmul import product_entry, product_header, product_lines
from fusewright.codegen.source import Entry, Piece, Source, macro
from fusewright.codegen.text import comment
from fusewright.codegen.weight_gradient import gradient_entry, gradient_header, gradient_lines
from fusewright.cost.conv_direct import DirectSchedule
from fusewright.errors import CodegenError
from fusewright.ir.loop import Apply, Instruction, Load, LoopKernel, Reduce
from fusewright.ir.matmul import ProductKernel
from fusewright.ir.operators import REDUCTIONS, SCALAR_OPS
from fusewright.ir.weight_gradient import GradientKernel
from fusewright.schedule.choice import Schedule
from fusewright.schedule.tensor_core import (
    EndedSchedule,
    GradientSchedule,
    ProductSchedule,
    WindowSchedule,
)
from fusewright.target.target import Target

# How long nvcc takes for a kernel, in tenths of a second of a Neoverse-N1: loops by their schedule,
# products, convolutions, those of what is computed on the way, and gradients by weights.
LOOPS = {"pointwise": 1, "transpose": 2}
OTHER_LOOPS, PRODUCTS, CONVOLUTIONS, COMPUTED, GRADIENTS = 5, 17, 29, 39, 33
KERNELS = Path(__file__).resolve().parent.parent / "kernels"
_PRECISIONS = (
    "// Which kernels are built, and how precise where flags decide that: 3 terms for float32's",
    "// precision, 1 for TF32's, 0 for none of them.",
)
_LOCAL_INCLUDE = re.compile(r'#include "([a-z0-9_/]+\.(?:hpp|cuh))"')


def render(
    kernels: Sequence[tuple[LoopKernel, Schedule]],
    target: Target,
    ended: Sequence[tuple[Ended, EndedSchedule]] = (),
    gradients: Sequence[tuple[GradientKernel, GradientSchedule]] = (),
) -> Source:
    """One translation unit with an entry per kernel and `fw_error_text`; `ended` are the kernels
    that end in a loop."""
    forms = [form(kernel, schedule, target) for kernel, schedule in kernels]
    epilogues = [ending_forms(kernel) for kernel, _ in ended]
    every = [*forms, *chain(*epilogues)]
    names = [each.kernel.name for each in every]
    names += [kernel.name for kernel, _ in gradients]
    if len(set(names)) != len(names):
        raise CodegenError(f"two kernels share a name: {sorted(names)}")
    lines: list[str] = []
    pasted: set[str] = set()
    headers = [name for each in ended for name in _headers(*each)]
    headers += [gradient_header(*each) for each in gradients]
    windows = [
        kernel for kernel, _ in (*ended, *gradients) if not isinstance(kernel, ProductKernel)
    ]
    if windows and all(kernel.geometry.z.is_single for kernel in windows):
        lines.append("#define FW_VOLUMES 0")
    bodies = [each.kernel.body for each in every]
    prologues = [each.prologue for each in windows]
    bodies += [each.body for each in prologues if each is not None]
    for root in [*_roots(forms, bodies, target), *sorted(set(headers))]:
        lines += flattened(root, pasted)
    made = [(entry(each, target), _kernel(each, target)) for each in forms]
    weights = [LOOPS.get(each.schedule.kind, OTHER_LOOPS) for each in forms]
    for (kernel, schedule), epilogue in zip(ended, epilogues, strict=True):
        made.append(_ended(kernel, epilogue, schedule))
        weights.append(_weight(kernel))
    for gradient, division in gradients:
        made.append((gradient_entry(gradient, division), gradient_lines(gradient, division)))
    weights += [GRADIENTS] * len(gradients)
    lines += _sections(made)
    pairs = zip(made, weights, strict=True)
    pieces = tuple(
        Piece("\n".join(text), weight, macro(each.terms)) for (each, text), weight in pairs
    )
    entries = tuple(each for each, _ in made)
    return Source(target.language, "\n".join(lines) + "\n", entries, pieces)


def _sections(made: Sequence[tuple[Entry, list[str]]]) -> list[str]:
    """The kernels; where flags decide how precise some are, each flag's can be built alone."""
    sections: dict[str, list[str]] = {}
    for each, text in made:
        sections.setdefault(each.terms, []).extend(["", *text])
    if not any(sections):
        return sections.get("", [])
    lines = ["", *_PRECISIONS]
    for terms in sections:
        lines += [f"#ifndef {macro(terms)}", f"#define {macro(terms)} 3", "#endif"]
    for terms, text in sections.items():
        lines += ["", f"#if {macro(terms)}", *text, "", f"#endif  // {macro(terms)}"]
    return lines


def _weight(kernel: Ended) -> int:
    if isinstance(kernel, ProductKernel):
        return PRODUCTS
    return CONVOLUTIONS if kernel.prologue is None else COMPUTED


def _headers(kernel: Ended, schedule: EndedSchedule) -> tuple[str, ...]:
    if isinstance(kernel, ProductKernel):
        return (product_header(kernel),)
    if not isinstance(schedule, DirectSchedule):
        return (WINDOW_HEADER,)
    header = direct_header(schedule)
    return (header, WINDOW_HEADER) if schedule.line_positions else (header,)


def _ended(
    kernel: Ended, epilogue: tuple[Form, ...], schedule: EndedSchedule
) -> tuple[Entry, list[str]]:
    if isinstance(kernel, ProductKernel):
        assert isinstance(schedule, ProductSchedule)
        return product_entry(kernel, schedule), product_lines(kernel, epilogue[0], schedule)
    if isinstance(schedule, DirectSchedule):
        return direct_entry(kernel, schedule), direct_lines(kernel, epilogue[0], schedule)
    assert isinstance(schedule, WindowSchedule)
    return window_entry(kernel, schedule), window_lines(kernel, epilogue, schedule)


def _roots(
    forms: Sequence[Form], bodies: Sequence[tuple[Instruction, ...]], target: Target
) -> list[str]:
    """The header files that these bodies call into, those of epilogues and prologues among them."""
    ops = [item.op for body in bodies for item in body if isinstance(item, Apply)]
    found = [item.kind for body in bodies for item in body if isinstance(item, Reduce)]
    needed = {SCALAR_OPS[op].header for op in ops} | {REDUCTIONS[kind].header for kind in found}
    headers = sorted(needed - {""})
    scanning = any(each.scans for each in forms)
    guarded = any(isinstance(i, Load) and i.access.guards for body in bodies for i in body)
    if target.language == "host":
        more = {"host/scan.hpp": scanning, "host/guarded.hpp": guarded}
        return [*headers, "host/loops.hpp", *(name for name, needed in more.items() if needed)]
    kinds = [kind for kind in ("pointwise", "row", "column") if _uses(forms, kind)]
    held = any(each.schedule.kind == "column" and each.schedule.cached for each in forms)
    kinds += ["held_column"] if held else []
    kinds += ["transpose"] if any(each.is_tiled for each in forms) else []
    kinds += ["scan"] if scanning else []
    kinds += ["guarded"] if guarded else []
    return [*headers, "cuda/lanes.cuh", *(f"cuda/{kind}.cuh" for kind in kinds)]


def _uses(forms: Sequence[Form], kind: str) -> bool:
    return any(each.schedule.kind == kind for each in forms)


def flattened(name: str, pasted: set[str]) -> list[str]:
    """A header's lines with its local includes in their place, each file once."""
    if name in pasted:
        return []
    pasted.add(name)
    lines: list[str] = []
    for line in (KERNELS / name).read_text().splitlines():
        local = _LOCAL_INCLUDE.match(line)
        if local:
            lines += flattened(local.group(1), pasted)
        elif line != "#pragma once":
            lines.append(line)
    return lines


def _kernel(form: Form, target: Target) -> list[str]:
    kernel = form.kernel
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in kernel.axes)
    head = [
        f"// {kernel.name}: {comment(kernel.summary)}",
        f"// {form.schedule.kind} over {comment(axes) or 'one element'}",
    ]
    body = ["namespace {", *head, *functor(form), *bind(form), "}  // namespace"]
    return [*body, *function(form, target)]
