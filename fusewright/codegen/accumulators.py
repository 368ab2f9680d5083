"""The accumulators of a sweep: one struct `Acc<k>` for all its reductions."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.codegen.access import lane_stride
from fusewright.codegen.form import Form
from fusewright.codegen.lanes import indented
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


def _meeting(form: Form, items: Sequence[Reduce], acc: str) -> list[str]:
    """`meet` and `combine_met`: threads first agree on a base, then only add. Some reductions are
    faster so (scalar/logsumexp.hpp)."""
    met = {form.names[item.name]: REDUCTIONS[item.kind].meets for item in items}
    if not any(met.values()):
        return ["static constexpr bool kMeets = false;"]
    meet = " ".join(f"{name}.meet(largest);" for name, meets in met.items() if meets)
    combine = " ".join(
        f"{name}.combine{'_met' if meets else ''}(other.{name});" for name, meets in met.items()
    )
    return [
        "static constexpr bool kMeets = true;",
        f"template <class Largest> FW_FN void meet(const Largest& largest) {{ {meet} }}",
        f"FW_FN void combine_met(const {acc}& other) {{ {combine} }}",
    ]


def accumulators(form: Form, k: int) -> list[str]:
    """`Acc<k>`, and the function that makes an empty one."""
    items = form.plan.reductions[k]
    names = [form.names[item.name] for item in items]
    together = [takes_vectors(form, item) for item in items]
    fields = [
        f"fw::{REDUCTIONS[item.kind].template}<{form.register(item.name)}, "
        f"{'1' if whole else 'V'}> {name};"
        for item, name, whole in zip(items, names, together, strict=True)
    ]
    acc = f"Acc{k}"
    combine = " ".join(f"{name}.combine(other.{name});" for name in names)
    struct = [
        f"static constexpr bool kEmpty = {'false' if items else 'true'};",
        *fields,
        f"FW_FN void combine(const {acc}& other) {{ {combine} }}",
    ]
    if form.language == "cuda":
        struct += _meeting(form, items, acc)
    if form.language == "host" or not form.is_row:
        lane = " ".join(f"one.{name} = {name}.lane(v);" for name in names)
        struct.append(f"FW_FN {acc}<1> lane(int v) const {{ {acc}<1> one; {lane} return one; }}")
    if form.language == "host" or form.is_row:
        folded = " ".join(
            f"one.{name} = {name}.folded({'1' if whole else 'n'});"
            for name, whole in zip(names, together, strict=True)
        )
        struct.append(
            f"FW_FN {acc}<1> folded(int n) const {{ {acc}<1> one; {folded} return one; }}"
        )
    return [
        "template <int V>",
        f"struct {acc} {{",
        *indented(struct),
        "};",
        "template <int V>",
        f"FW_FN {acc}<V> accumulators(fw::Phase<{k}>) const {{ return {acc}<V>{{}}; }}",
    ]
