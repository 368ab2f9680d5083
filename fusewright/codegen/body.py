"""The functor of a kernel: the same C++ text for nvcc and for g++.

Pointers, symbols and constants are members. `load` reads V lanes of every element access. `visit`
computes, accumulates and stores them. `begin` computes row values before the first sweep, `finish`
after each sweep, and `store` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusewright.codegen.access import (
    element,
    goes_wide,
    holder,
    is_strided,
    loaded_slots,
    outside_lines,
    read,
    store_lines,
    stored_slots,
    transpose_lines,
    transposed_loads,
    widened,
)
from fusewright.codegen.accumulators import accumulators, takes_vectors
from fusewright.codegen.divide import divisor_aliases, divisor_fields, divisor_made
from fusewright.codegen.form import Form, all_coordinates, constants, decompose
from fusewright.codegen.lanes import (
    Computed,
    computed,
    function_lines,
    indented,
    kept_slot,
    kept_slots,
    lane_loop,
    loaded_name,
    register_bytes,
    used,
)
from fusewright.codegen.row_factors import factor_aliases, factor_parts
from fusewright.codegen.runs import Ends, lanes_of_run, pair_lines, staged_loops, sum_lines
from fusewright.codegen.scans import scan_lines, scanned_parts
from fusewright.codegen.shared_memory import shared_parts
from fusewright.codegen.text import literal, size_text
from fusewright.codegen.transpose import tile_parts
from fusewright.ir.graph import ONE, Dim, Ratio, product
from fusewright.ir.loop import Apply, Load, Reduce, Scan, Store
from fusewright.ir.operators import REDUCTIONS, STORAGE_TYPES
from fusewright.schedule.sweeps import element_loads, late_sweep, part_bytes
from fusewright.schedule.vector_width import lane_axis


def functor(form: Form) -> list[str]:
    """The struct `<kernel>_body<I>`."""
    parts = [members(form), _extents(form)]
    parts += tile_parts(form) if form.is_tiled else []
    if form.is_flat:
        parts += [elem_struct(form, pointwise_loads(form))]
        parts += [_pointwise_load(form), _pointwise_visit(form)]
        parts += [transpose_lines(form)] if transposed_loads(form) else []
    else:
        excluded = {*form.tiles, *form.factors}
        loads = [x for x in element_loads(form.kernel, form.plan) if x not in excluded]
        parts += [elem_struct(form, loads), *factor_parts(form), _row_struct(form)]
        sums = [accumulators(form, k) for k in range(form.plan.count)]
        parts += scanned_parts(form) if form.scans else sums
        in_memory = form.kept and form.language == "host"
        parts += [_begin(form), *([_keep(form)] if in_memory else []), _load(form, loads)]
        parts += shared_parts(form) if form.schedule.shared else []
        for k in range(form.plan.count):
            parts += [_visit(form, k), *([] if form.scans else [_finish(form, k)])]
        parts += [_visit_two(form)] if pair_lines(form) else []
        parts += [_row_store(form)]
    parts += [_give(form)] if form.given else []
    lines = ["template <typename I>", f"struct {form.kernel.name}_body {{"]
    for at, part in enumerate(parts):
        lines += ([""] if at else []) + indented(part)
    return [*lines, "};"]


def pointwise_loads(form: Form) -> list[Load]:
    return [item for item in form.kernel.body if isinstance(item, Load) and item not in form.tiles]


def members(form: Form) -> list[str]:
    lines = []
    for argument in form.kernel.arguments:
        const = "" if argument.is_output else "const "
        storage = STORAGE_TYPES[argument.dtype]
        lines.append(f"{const}{storage}* {form.pointers[argument.name]};")
    lines += [f"I {name};" for name in form.symbols.values()]
    lines += outside_lines(form)
    for item in constants(form):
        name, kind = form.names[item.name], form.register(item.name)
        if isinstance(item.value, Dim | Ratio):
            lines.append(f"{kind} {name};  // set when the sizes are known")
        else:
            lines.append(f"static constexpr {kind} {name} = {literal(item.value, item.dtype)};")
    return lines


def _extents(form: Form) -> list[str]:
    kernel, schedule = form.kernel, form.schedule
    flat = form.is_flat
    axes = kernel.outer if flat else kernel.inner
    last = axes[-1].size if axes else ONE
    transposed = form.transposed if flat else form.transposed_inner
    rest = product(tuple(axis.size for at, axis in enumerate(axes[:-1]) if at != transposed))
    flags = {"kRest": len(axes) > 1}
    numbers: dict[str, int] = {}
    extents = {"lane_extent": last, "rest_extent": rest}
    if transposed is not None:
        extents["transposed_extent"] = axes[transposed].size
    if flat and transposed is None:
        whole = last.is_static and last.factor % schedule.lanes == 0
        whole = whole or last.divided_by(schedule.lanes) is not None
        flags["kTail"] = not whole
        if form.language == "host":
            flags["kStrided"] = is_strided(form)
            numbers["kTransposed"] = len(transposed_loads(form))
            numbers["kRun"] = lanes_of_run(form, _values(form))
    elif not flat:
        outer_last = kernel.outer[-1].size if kernel.outer else ONE
        flags["kOuterRest"] = len(kernel.outer) > 1
        flags["kSplit"] = schedule.splits > 1
        flags |= {"kBackward": form.scans[0].backward} if form.scans else {}
        if form.given:
            flags["kByPosition"] = bool(form.positions)
        if form.language == "host":
            flags["kByTwo"] = bool(pair_lines(form))
        extents |= {"outer_extent": kernel.outer_numel, "outer_lane_extent": outer_last}
        extents["inner_extent"] = kernel.inner_numel
    lines = [f"static constexpr bool {key} = {str(flag).lower()};" for key, flag in flags.items()]
    lines += [f"static constexpr int {key} = {number};" for key, number in numbers.items()]
    if not flat:
        lines.append(f"static constexpr int kPhases = {form.plan.count};")
        lines.append(f"static constexpr int kPartBytes = {part_bytes(form.plan)};")
        if form.language == "host":
            kept = sum(register_bytes(form, name) for name in form.kept)
            lines.append(f"static constexpr int kKeptBytes = {kept};")
    for key, size in extents.items():
        lines.append(f"FW_FN I {key}() const {{ return {size_text(size, form.symbols)}; }}")
    return lines


def elem_struct(form: Form, loads: list[Load]) -> list[str]:
    fields = [f"{holder(form, item, True, 'V')} {form.names[item.name]};" for item in loads]
    if form.language == "cuda":
        fields += [f"{form.register(name)} {form.names[name]}_kept[V];" for name in form.kept]
    return ["template <int V>", "struct Elem {", *indented(fields), "};"]


def _row_struct(form: Form) -> list[str]:
    index = "int" if form.positions else "I"
    names = ", ".join(f"i{at}" for at in range(form.n_outer))
    fields = [f"{index} {names};"] if form.n_outer else []
    fields += [f"{form.register(name)} {form.names[name]}[V];" for name in _row_values(form)]
    fields += divisor_fields(form)
    if form.language == "host":
        fields += [f"{form.register(name)}* {form.names[name]}_kept;" for name in form.kept]
    return ["template <int V>", "struct Row {", *indented(fields), "};"]


def _row_values(form: Form) -> list[str]:
    fixed = {item.name for item in constants(form)}
    return [
        name for name in form.dtypes if not form.plan.level.is_element[name] and name not in fixed
    ]


def _known(form: Form, name: str) -> list[str]:
    """Statements that put lane v of a row value into the row struct."""
    return [f"row.{form.names[name]}[v] = {form.names[name]};", *divisor_made(form, name)]


def _with_lane(form: Form, at: list[str], element: bool) -> list[str]:
    """The coordinates of lane v."""
    axis = lane_axis(form.kernel, form.schedule.kind)
    if axis is None or (form.is_row and not element):
        return at
    return [f"{name} + v" if position == axis else name for position, name in enumerate(at)]


def _values(form: Form) -> list[Computed]:
    return [item for item in form.kernel.body if isinstance(item, Computed)]


def _pointwise_load(form: Form) -> list[str]:
    at = all_coordinates(form)
    reads = [
        read(form, item, True, f"elem.{form.names[item.name]}", at)
        for item in pointwise_loads(form)
    ]
    head = decompose(form, form.kernel.outer, "i", "l", form.transposed)
    indices = "I q, I m, I l" if form.is_tiled else "I q, I l"
    return function_lines("int V", f"load(Elem<V>& elem, {indices})", used(head, reads) + reads)


def _pointwise_visit(form: Form) -> list[str]:
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


def _give(form: Form) -> list[str]:
    """The function that sets lane v of the value that is given instead of loaded."""
    line = f"elem.{form.names[form.given]}.set(v, value);"
    return function_lines("int V", "give(Elem<V>& elem, int v, float value)", [line])


def _begin(form: Form) -> list[str]:
    """The function that computes row values before the first sweep."""
    at = all_coordinates(form)
    items = [item for item in _values(form) if _row_at(form, item.name, 0)]
    indices, lines = "I q, I l", decompose(form, form.kernel.outer, "i", "l")
    if form.positions:
        indices = "int image, int y, int x"
        lines = [f"const I i{position} = {text};" for position, text in enumerate(form.positions)]
    lines += [f"row.i{position} = i{position};" for position in range(form.n_outer)]
    for item in items:
        if isinstance(item, Load):
            held = loaded_name(form, item)
            lines.append(f"{holder(form, item, False, 'V')} {held};")
            lines.append(read(form, item, False, held, at))
    lane = _with_lane(form, at, False)
    body = []
    for item in items:
        body.append(computed(form, item, loaded_name(form, item), lane))
        body += _known(form, item.name)
    signature = f"begin(Row<V>& row, {indices}, int n)"
    return function_lines("int V", signature, lines + lane_loop(body))


def _keep(form: Form) -> list[str]:
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


def _load(form: Form, loads: list[Load]) -> list[str]:
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


def _visit(form: Form, k: int) -> list[str]:
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
    stepping = [r for r in reductions if r.kind == "welford" and not takes_vectors(form, r)]
    steps = [f"acc.{form.names[r.name]}.step();" for r in stepping]
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
    template, tile = "int V, int W", ""
    const = "" if form.language == "cuda" and k in form.kept.values() else "const "
    if form.is_tiled:
        template, tile = "int V, int W, class Tile", "const Tile& tile, "
    acc = "Scanned<V>& scanned" if form.scans else f"Acc{k}<V>& acc"
    factors = "const Factors& factors, " if form.has_factors else ""
    signature = (
        f"visit(fw::Phase<{k}>, {const}Elem<V>& elem, {factors}const Row<W>& row, {acc}, "
        f"{tile}{_inner_indices(form)}, int n)"
    )
    return function_lines(template, signature, used(_inner_heads(form), lines) + lines)


def _visit_two(form: Form) -> list[str]:
    signature = "visit_two(const Elem<V>& elem, const Elem<V>& next, Acc0<V>& acc, int n)"
    return function_lines("int V", signature, pair_lines(form))


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
        for name in _row_values(form)
        if name in wanted
    ]
    return lines + divisor_aliases(form, items, lane)


def _finish(form: Form, k: int) -> list[str]:
    """After sweep k: the results of its reductions, and the row values computed from them."""
    body: list[str] = []
    known: set[str] = set()
    for reduction in form.plan.reductions[k]:
        methods = REDUCTIONS[reduction.kind].results
        for name, method in zip((reduction.name, reduction.second), methods, strict=False):
            right = f"acc.{form.names[reduction.name]}.{method}(v)"
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
    signature = f"finish(fw::Phase<{k}>, Row<V>& row, const Acc{k}<V>& acc, int n)"
    return function_lines("int V", signature, lane_loop(body))


def _row_store(form: Form) -> list[str]:
    stores = form.plan.row_stores
    heads, puts, writes = store_lines(form, stores, False, all_coordinates(form, "row."))
    body = [*heads, *lane_loop(_row_aliases(form, (), stores, (), "v") + puts), *writes]
    return function_lines("int V", "store(const Row<V>& row, int n)", body)
