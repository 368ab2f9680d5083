"""A loop kernel in C++: its functor, its entry, and the headers that they need."""

from __future__ import annotations

from fusewright.codegen.body import functor
from fusewright.codegen.entry import bind, function
from fusewright.codegen.form import Form, form
from fusewright.codegen.source import Rendered
from fusewright.codegen.text import comment
from fusewright.ir.loop import LoopKernel
from fusewright.schedule.choice import Schedule
from fusewright.target.target import Target

WEIGHTS = {"pointwise": 1, "transpose": 2}
OTHER_WEIGHT = 5


def render_loop(kernel: LoopKernel, schedule: Schedule, target: Target) -> Rendered:
    found = form(kernel, schedule, target)
    return Rendered(
        _lines(found, target),
        WEIGHTS.get(schedule.kind, OTHER_WEIGHT),
        names=(kernel.name,),
        bodies=(found.kernel,),
        headers=_headers(found, target),
    )


def _headers(form: Form, target: Target) -> tuple[str, ...]:
    if target.language == "host":
        return ("host/scan.hpp",) if form.scans else ()
    kind = form.schedule.kind
    found = {
        f"cuda/{kind}.cuh": kind in ("pointwise", "row", "column"),
        "cuda/held_column.cuh": kind == "column" and form.schedule.cached,
        "cuda/transpose.cuh": form.is_tiled,
        "cuda/scan.cuh": bool(form.scans),
    }
    return tuple(name for name, needed in found.items() if needed)


def _lines(form: Form, target: Target) -> list[str]:
    kernel = form.kernel
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in kernel.axes)
    head = [
        f"// {kernel.name}: {comment(kernel.summary)}",
        f"// {form.schedule.kind} over {comment(axes) or 'one element'}",
    ]
    body = ["namespace {", *head, *functor(form), *bind(form), "}  // namespace"]
    return [*body, *function(form, target)]
