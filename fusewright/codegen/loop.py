"""A loop kernel in C++: its functor, its entry, and the headers that they need."""

from __future__ import annotations

from fusewright.codegen.entry import function
from fusewright.codegen.equation import equations, extents_line, told
from fusewright.codegen.form import Form, form
from fusewright.codegen.functor import functor
from fusewright.codegen.source import Rendered
from fusewright.ir.loop import LoopKernel
from fusewright.schedule.choice import Schedule
from fusewright.target.target import Target

WEIGHTS = {"pointwise": 1, "transpose": 2}
OTHER_WEIGHT = 5


def render_loop(kernel: LoopKernel, schedule: Schedule, target: Target) -> Rendered:
    found = form(kernel, schedule, target)
    return Rendered(
        function(found, target),
        WEIGHTS.get(schedule.kind, OTHER_WEIGHT),
        names=(kernel.name,),
        comment=told(kernel, equations(found), extents_line(found)),
        functors=(functor(found),),
        bodies=(found.kernel,),
        headers=_headers(found, target),
    )


def _headers(form: Form, target: Target) -> tuple[str, ...]:
    if target.language == "host":
        return ("host/scan.hpp",) if form.scans else ()
    kind = form.schedule.kind
    found = {
        f"cuda/{kind}.cuh": kind in ("pointwise", "row", "column"),
        "cuda/cluster_row.cuh": form.schedule.cluster > 1,
        "cuda/held_column.cuh": kind == "column" and form.schedule.cached,
        "cuda/transpose.cuh": kind in ("transpose", "transpose_row"),
        "cuda/transpose_column.cuh": kind == "transpose_column",
        "cuda/scan.cuh": bool(form.scans),
    }
    return tuple(name for name, needed in found.items() if needed)
