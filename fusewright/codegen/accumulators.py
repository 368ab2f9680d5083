"""The accumulators of a sweep, one for each of its reductions."""

from __future__ import annotations

from fusewright.codegen.access import lane_stride
from fusewright.codegen.form import Form
from fusewright.ir.graph import HALF_DTYPES, ONE
from fusewright.ir.loop import Apply, Load, Reduce
from fusewright.ir.operators import REDUCTIONS


def takes_vectors(form: Form, item: Reduce) -> bool:
    """Whether a reduction adds all lanes of a vector at once. Row schedules on a GPU do."""
    if half_operand_of(form, item):
        return True
    types = {form.register(item.name), form.register(item.operand)}
    both: tuple[set[str], ...] = ({"float"}, {"double"})
    fitting = {"sum": both[:1], "welford": both, "logsumexp": both}.get(item.kind, ())
    return form.language == "cuda" and form.is_row and types in fitting


def half_operand_of(form: Form, item: Reduce) -> str:
    """The contiguous 16-bit load whose maximum or minimum along a row a GPU takes in pairs, or ""
    if the reduction has another operand."""
    on_gpu = form.language == "cuda" and form.is_row and form.register(item.name) == "float"
    if item.kind not in ("max", "min") or not on_gpu:
        return ""
    made = {x.name: x for x in form.kernel.body if isinstance(x, Load | Apply)}
    source = made.get(item.operand)
    if isinstance(source, Apply) and source.op == "cast" and source.dtype == "float32":
        source = made.get(source.operands[0])
    if not isinstance(source, Load) or source in form.tiles or source.dtype not in HALF_DTYPES:
        return ""
    stride = form.plan.level.is_element[source.name] and lane_stride(form, source.access, True)
    excluded = source.name == form.given or bool(source.access.guards)
    return source.name if stride == ONE and not excluded else ""


def accumulator(at: int) -> str:
    """The accumulator of a sweep's reduction with this number."""
    return f"fw::nth<{at}>(acc)"


def accumulators(form: Form, k: int) -> str:
    """The declaration of a sweep's accumulators, one for each of its reductions."""
    types = [
        f"fw::{REDUCTIONS[item.kind].template}<{form.register(item.name)}, "
        f"{'1' if takes_vectors(form, item) else 'V'}>"
        for item in form.plan.reductions[k]
    ]
    return f"FW_REDUCES({', '.join([str(k), *types])})"
