"""The functions of a functor (see `functor`)."""

from __future__ import annotations

from collections.abc import Iterable

from fusewright.codegen.access import (
    element,
    goes_wide,
    holder,
    lane_stride,
    loaded_slots,
    read,
    store_lines,
    stored_slots,
    widened,
)
from fusewright.codegen.accumulators import accumulator, takes_vectors
from fusewright.codegen.divide import divisor_aliases, divisor_made
from fusewright.codegen.form import Form, all_coordinates, decompose, offset_text
from fusewright.codegen.lanes import (
    Computed,
    computed,
    function_lines,
    kept_slot,
    kept_slots,
    lane_loop,
    loaded_name,
    register_bytes,
    used,
)
from fusewright.codegen.members import grouped
from fusewright.codegen.row_factors import factor_aliases
from fusewright.codegen.runs import Ends, pair_lines, staged_loops, sum_lines
from fusewright.codegen.scans import scan_lines
from fusewright.ir.graph import ONE, ZERO
from fusewright.ir.loop import Apply, Load, Reduce, Scan, Store
from fusewright.ir.operators import REDUCTIONS
from fusewright.schedule.sweeps import late_sweep
from fusewright.schedule.vector_width import lane_axis


def pointwise_loads(form: Form) -> list[Load]:
    return [item for item in form.kernel.body if isinstance(item, Load) and item not in form.tiles]


def _known(form: Form, name: str) -> list[str]:
    """Statements that put lane v of a row value into the row struct."""
    kept = [f"row.{form.names[name]}[v] = {form.names[name]};"] * (name in form.row_values)
    return [*kept, *divisor_made(form, name)]


def _with_lane(form: Form, at: list[str], element: bool) -> list[str]:
    """The coordinates of lane v."""
    axis = lane_axis(form.kernel, form.schedule.kind)
    if axis is None or (form.is_row and not element):
        return at
    return [f"{name} + v" if position == axis else name for position, name in enumerate(at)]


def _values(form: Form) -> list[Computed]:
    return [item for item in form.kernel.body if isinstance(item, Computed)]


def pointwise_load(form: Form) -> list[str]:
    at = all_coordinates(form)
    reads = [
        read(form, item, True, f"elem.{form.names[item.name]}", at)
        for item in pointwise_loads(form)
    ]
    head = decompose(form, form.kernel.outer, "i", "l", form.transposed)
    indices = "I q, I m, I l" if form.is_tiled else "I q, I l"
    return function_lines("int V", f"load(Elem<V>& elem, {indices})", used(head, reads) + reads)


def pointwise_visit(form: Form) -> list[str]:
    at = all_coordinates(form)
    lane = _with_lane(form, at, True)

    items = _values(form)
    wide = goes_wide(form, items)

    def compute(item: Computed, near: bool) -> list[str]:
        return [computed(form, item, element(form, item, wide), lane, near)]

    stores = [item for item in form.kernel.body if isinstance(item, Store)]
    heads, puts, writes = store_lines(form, stores, True, at, wide)
    heads += widened(form, items) if wide else []
    ends = Ends(loaded_slots(form, items), stored_slots(form, stores))
    lines = [*heads, *staged_loops(form, items, compute, [], puts, ends=ends), *writes]
    first = used(decompose(form, form.kernel.outer, "i", "l", form.transposed), lines)
    if form.is_tiled:
        signature = "visit(const Elem<V>& elem, const Tile& tile, I q, I m, I l, int n)"
        return function_lines("int V, class Tile", signature, first + lines)
    signature = "visit(const Elem<V>& elem, I q, I l, int n)"
    return function_lines("int V", signature, first + lines)


def begin(form: Form) -> list[str]:
    """The function that computes row values before the first sweep."""
    at = all_coordinates(form)
    items = [item for item in _values(form) if _row_at(form, item.name, 0)]
    indices, lines = "I q, I l", decompose(form, form.kernel.outer, "i", "l")
    if form.positions:
        indices = "int image, int y, int x"
        lines = [f"const I i{position} = {text};" for position, text in enumerate(form.positions)]
    lines += [f"row.i{position} = i{position};" for position in range(form.n_outer)]
    loads = [item for item in items if isinstance(item, Load)]
    held = [(holder(form, item, False, "V"), loaded_name(form, item)) for item in loads]
    lines += grouped(held, 94)
    lines += [read(form, item, False, loaded_name(form, item), at) for item in loads]
    lane = _with_lane(form, at, False)
    body = []
    for item in items:
        body.append(computed(form, item, loaded_name(form, item), lane))
        body += _known(form, item.name)
    signature = f"begin(Row<V>& row, {indices}, int n)"
    return function_lines("int V", signature, lines + lane_loop(body))


def keeps(form: Form) -> bool:
    """Whether values are kept in memory between sweeps."""
    return bool(form.kept) and form.language == "host"


def keep(form: Form) -> list[str]:
    """The function that gives memory to a row's kept values. The largest type comes first, so all
    are aligned."""
    lines, at = [], 0
    for name in sorted(form.kept, key=lambda name: -register_bytes(form, name)):
        where = f"memory + {at} * inner_extent()" if at else "memory"
        kind = form.register(name)
        lines.append(f"row.{form.names[name]}_kept = reinterpret_cast<{kind}*>({where});")
        at += register_bytes(form, name)
    return function_lines("int V", "keep(Row<V>& row, char* memory)", lines)


def _row_at(form: Form, name: str, phase: int) -> bool:
    level = form.plan.level
    return not level.is_element[name] and level.phase[name] == phase


def _inner_heads(form: Form) -> list[str]:
    lane = "l" if form.is_row else ""
    return decompose(form, form.kernel.inner, "j", lane, form.transposed_inner)


def _inner_indices(form: Form) -> str:
    return "I q, I l" if form.transposed_inner is None else "I q, I m, I l"


def load(form: Form, loads: list[Load]) -> list[str]:
    """Phase<k> loads what sweep k needs. With kept rows, Phase<-1> loads what all sweeps share, and
    Phase<-1-k> what only sweep k needs."""
    at = all_coordinates(form, "row.")
    body = []
    for item in loads:
        if item.name == form.given:
            continue
        name = form.names[item.name]
        need = [k for k in range(form.plan.count) if item.name in form.plan.needed[k]]
        late = late_sweep(form.kernel, form.plan, item)
        test = " || ".join(f"K == {k}" for k in (-1 - late, *need))
        body.append(f"if constexpr ({test}) {read(form, item, True, f'elem.{name}', at)}")
    indices = _inner_indices(form)
    signature = f"load(fw::Phase<K>, Elem<V>& elem, const Row<W>& row, {indices})"
    return function_lines("int K, int V, int W", signature, used(_inner_heads(form), body) + body)


def visit(form: Form, k: int) -> list[str]:
    """Sweep k over V lanes: compute, accumulate, and store if it is the last sweep."""
    at = all_coordinates(form, "row.")
    lane = _with_lane(form, at, True)
    needed = [item for item in _values(form) if item.name in form.plan.needed[k]]
    items = [item for item in needed if item not in form.factors]
    stores = form.plan.inner_stores if k == form.plan.count - 1 else ()
    reductions = form.plan.reductions[k]
    wide = goes_wide(form, items)
    heads, puts, writes = store_lines(form, stores, True, at, wide)
    heads += widened(form, items) if wide else []

    def compute(item: Computed, near: bool) -> list[str]:
        name = form.names[item.name]
        start, slot = form.kept.get(item.name, k), kept_slot(form, item.name)
        if start < k:
            return [f"const {form.register(item.name)} {name} = {slot};"]
        line = computed(form, item, element(form, item, wide), lane, near)
        return [line, f"{slot} = {name};"] if item.name in form.kept else [line]

    ends = Ends(loaded_slots(form, items), stored_slots(form, stores))
    fresh = [item for item in items if form.kept.get(item.name, k) == k]
    sums = sum_lines(form, reductions, fresh, ends)
    steps = [
        f"{accumulator(at)}.step();"
        for at, each in enumerate(reductions)
        if each.kind == "welford" and not takes_vectors(form, each)
    ]
    scanned = form.plan.scans[k]
    swept: tuple[Reduce | Scan, ...] = (*reductions, *scanned)
    aliases = _row_aliases(form, items, stores, swept, "0" if form.is_row else "v")
    outside, inside = (aliases, []) if form.is_row else ([], aliases)
    read_back = frozenset(name for name, start in form.kept.items() if start < k)
    loops = []
    by_lane = [*sums.by_lane, *scan_lines(form, scanned)]
    if by_lane or sums.after or puts or any(form.kept.get(item.name) == k for item in items):
        after = [*by_lane, *puts]
        loops = staged_loops(form, items, compute, inside, after, read_back, ends, sums.summed)
    lines = [*outside, *heads, *kept_slots(form, items), *steps, *sums.before, *loops]
    lines += [*sums.after, *writes]
    lines[:0] = factor_aliases(form, lines)
    template = "int V, int W" if form.scans else "int V, int W, class Acc"
    const = "" if form.language == "cuda" and k in form.kept.values() else "const "
    tile = "const Tile& tile, " if form.is_tiled else ""
    template += ", class Tile" if form.is_tiled else ""
    acc = "Scanned<V>& scanned" if form.scans else "Acc& acc"
    factors = "const Factors& factors, " if form.has_factors else ""
    signature = (
        f"visit(fw::Phase<{k}>, {const}Elem<V>& elem, {factors}const Row<W>& row, {acc}, "
        f"{tile}{_inner_indices(form)}, int n)"
    )
    return function_lines(template, signature, used(_inner_heads(form), lines) + lines)


def visit_two(form: Form) -> list[str]:
    signature = "visit_two(const Elem<V>& elem, const Elem<V>& next, Acc& acc, int n)"
    return function_lines("int V, class Acc", signature, pair_lines(form))


def _row_aliases(
    form: Form,
    items: Iterable[Computed],
    stores: Iterable[Store],
    reductions: Iterable[Reduce | Scan],
    lane: str,
) -> list[str]:
    """Local names for the row values that these instructions read."""
    wanted = {name for item in items if isinstance(item, Apply) for name in item.operands}
    wanted |= {item.value for item in stores} | {item.operand for item in reductions}
    lines = [
        f"const {form.register(name)} {form.names[name]} = row.{form.names[name]}[{lane}];"
        for name in form.row_values
        if name in wanted
    ]
    return lines + divisor_aliases(form, items, lane)


def finish(form: Form, k: int) -> list[str]:
    """After sweep k: the results of its reductions, and the row values computed from them."""
    body: list[str] = []
    known: set[str] = set()
    for at, reduction in enumerate(form.plan.reductions[k]):
        methods = REDUCTIONS[reduction.kind].results
        for name, method in zip((reduction.name, reduction.second), methods, strict=False):
            right = f"{accumulator(at)}.{method}(v)"
            body.append(f"const {form.register(name)} {form.names[name]} = {right};")
            body += _known(form, name)
            known.add(name)
    items = [i for i in _values(form) if isinstance(i, Apply) and _row_at(form, i.name, k + 1)]
    known |= {item.name for item in items}
    aliases = _row_aliases(form, items, (), (), "v")
    fresh = {form.names[name] for name in known}
    body[:0] = [line for line in aliases if line.split()[2] not in fresh]
    for item in items:
        body.append(computed(form, item, "", []))
        body += _known(form, item.name)
    signature = f"finish(fw::Phase<{k}>, Row<V>& row, const Acc& acc, int n)"
    return function_lines("int V, class Acc", signature, lane_loop(body))


def row_store(form: Form) -> list[str]:
    """The function that writes row values. Those that are contiguous are written by one call."""
    stores, at = form.plan.row_stores, all_coordinates(form, "row.")
    plain = [item for item in stores if lane_stride(form, item.access, False) in (ZERO, ONE)]
    whole = [item for item in plain if item.value in form.row_values]
    lines = []
    for item in whole:
        where = f"{form.pointers[item.access.buffer]}, {offset_text(form, item.access, at)}"
        lines.append(f"fw::put_row<V>({where}, row.{form.names[item.value]}, n);")
    rest = [item for item in stores if item not in whole]
    heads, puts, writes = store_lines(form, rest, False, at)
    loop = lane_loop(_row_aliases(form, (), rest, (), "v") + puts)
    return function_lines(
        "int V", "store(const Row<V>& row, int n)", [*lines, *heads, *loop, *writes]
    )
