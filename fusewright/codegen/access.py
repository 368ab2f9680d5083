"""Reads and writes of a run of lanes: the holder of each access, and conversions of 16-bit floats.

On the host, 16-bit floats beside a costly operator are converted in separate loops. g++ does not
vectorise a loop over two widths well (gelu took 2 to 50 times eager's time).
"""

from __future__ import annotations

from collections.abc import Iterable

from fusewright.codegen.form import Form, linear_text, offset_text
from fusewright.codegen.lanes import Computed, function_lines, run_text
from fusewright.codegen.text import literal
from fusewright.ir.graph import HALF_DTYPES, ONE, ZERO, Dim
from fusewright.ir.loop import Access, Apply, Load, Store
from fusewright.ir.operators import REGISTER_TYPES, SCALAR_OPS, STORAGE_TYPES
from fusewright.schedule.flat import is_flat
from fusewright.schedule.vector_width import lane_accesses, lane_axis

COSTLY = 12

NEAR_STRIDE = 8  # elements; lanes that are closer share cache lines anyway
MOST_TRANSPOSED = 8  # loads; each takes 8 KB of stack and a quarter of a second of g++'s time


def is_strided(form: Form) -> bool:
    """Whether some access has a large stride along the lanes, and there is another outer axis."""
    accesses = lane_accesses(form.kernel, form.schedule.kind)
    strides = [lane_stride(form, each, True) for each in accesses]
    far = any(abs(each.factor) > NEAR_STRIDE or (each.symbols and each.factor) for each in strides)
    return len(form.kernel.outer) > 1 and far


def transposed_loads(form: Form) -> list[Load]:
    """The loads that a host tile transposes: strided along the lanes, but contiguous along the axis
    before."""
    if form.language != "host" or form.schedule.kind != "pointwise" or not is_strided(form):
        return []
    if _guarded_loads(form):  # A thread holds one run of a guarded load at a time.
        return []
    previous = len(form.kernel.outer) - 2
    found = [
        item
        for item in form.kernel.body
        if isinstance(item, Load)
        and item.access.strides[previous] == ONE
        and lane_stride(form, item.access, True) not in (ZERO, ONE)
    ]
    return found[:MOST_TRANSPOSED]


def transpose_lines(form: Form) -> list[str]:
    """The function that transposes these loads into memory where lanes are contiguous."""
    lines = [
        f"fw::transpose_tile(elem, &Elem<V>::{form.names[item.name]}, rows, n, "
        f"memory + {at} * fw::kTransposedBytes);"
        for at, item in enumerate(transposed_loads(form))
    ]
    return function_lines(
        "int V", "transpose_tile(Elem<V>* elem, int rows, int n, char* memory)", lines
    )


def lane_stride(form: Form, access: Access, element: bool) -> Dim:
    """The access's stride from one lane to the next."""
    axis = _own_lanes(form, element)
    return ZERO if axis is None else access.strides[axis]


def holder(form: Form, item: Load, element: bool, lanes: str) -> str:
    """The C++ type that holds the lanes of a load."""
    if item.name == form.given:
        return f"fw::Given<{REGISTER_TYPES[item.dtype]}, {lanes}>"
    stride = lane_stride(form, item.access, element)
    kind = "Same" if stride == ZERO else "Unit" if stride == ONE else "Strided"
    if kind == "Strided" and item in transposed_loads(form):
        kind = "TransposedRun"
    if kind == "Unit" and form.schedule.flat and not is_flat(form.kernel, item.access):
        kind = "Loose"
    lane = f"{STORAGE_TYPES[item.dtype]}, {lanes}"
    if not item.access.guards:
        return f"fw::{kind}<{lane}>"
    each = any(step != ZERO for step in _lane_steps(form, item, element))
    if form.language == "cuda":
        return f"fw::GuardedLanes<{lane}>" if each else f"fw::Guarded<fw::{kind}<{lane}>, {lane}>"
    kind = "Strided" if each and kind == "Same" else kind
    return f"fw::Guarded<fw::{kind}<{lane}>, {_guarded_loads(form).index(item)}>"


def _guarded_loads(form: Form) -> list[Load]:
    return [item for item in form.kernel.body if isinstance(item, Load) and item.access.guards]


def outside_lines(form: Form) -> list[str]:
    """The values of guarded loads outside of their tensors."""
    return [
        f"static constexpr {REGISTER_TYPES[dtype]} {name} = {text};"
        for (dtype, text), name in _outsides(form).items()
    ]


def _outsides(form: Form) -> dict[tuple[str, str], str]:
    found = dict.fromkeys(_outside(item) for item in _guarded_loads(form))
    return {each: f"kOutside{at}" for at, each in enumerate(found)}


def _outside(item: Load) -> tuple[str, str]:
    return item.dtype, literal(item.outside, item.dtype)


def _lane_steps(form: Form, item: Load, element: bool) -> list[Dim]:
    """The step of each guard's index from one lane to the next."""
    axis = _own_lanes(form, element)
    return [ZERO if axis is None else guard.steps[axis] for guard in item.access.guards]


def _own_lanes(form: Form, element: bool) -> int | None:
    """The axis of a load's lanes. A row value of a row schedule has only one lane."""
    return None if form.is_row and not element else lane_axis(form.kernel, form.schedule.kind)


def _bounds(form: Form, item: Load, element: bool, at: list[str]) -> list[str]:
    """The further arguments of a guarded load: the value outside, the number of lanes (host only),
    and the bounds."""
    outside = _outsides(form)[_outside(item)]
    found = [f"fw::Store<{STORAGE_TYPES[item.dtype]}>::from({outside})"]
    if form.language == "host":
        found.append(_lanes_text(form, element, at))
    steps = _lane_steps(form, item, element)
    for guard, step in zip(item.access.guards, steps, strict=True):
        index = linear_text(form, guard.steps, (Dim(guard.start),), at)
        found.append(f"fw::bound<{step}>(I({index}), I({guard.size}))")
    return found


def _lanes_text(form: Form, element: bool, at: list[str]) -> str:
    """The number of lanes that are left for a host run."""
    axis = _own_lanes(form, element)
    if axis is None:
        return "1"
    tiled = form.schedule.kind == "pointwise" and is_strided(form)
    most = "fw::kTile" if tiled else run_text(form)
    return f"std::min<int64_t>({most}, {form.size(form.kernel.axes[axis].size)} - {at[axis]})"


def read(
    form: Form, item: Load, element: bool, holder: str, at: list[str], verb: str = "read"
) -> str:
    where = f"{form.pointers[item.access.buffer]} + ({offset_text(form, item.access, at)})"
    stride = lane_stride(form, item.access, element)
    extra = [] if stride in (ZERO, ONE) and not item.access.guards else [form.size(stride)]
    extra += _bounds(form, item, element, at) if item.access.guards else []
    return f"{holder}.{verb}({', '.join([where, *extra])});"


def _out(form: Form, at: int, item: Store, element: bool, where: list[str]) -> tuple[str, str]:
    """The declaration of a store's lanes and its name."""
    if item in form.tiles:
        return f"const auto out_{at} = {tile_lanes(form, item)};", f"out_{at}"
    stride = lane_stride(form, item.access, element)
    unit = stride in (ZERO, ONE)
    name = f"out_{at}"
    kind = "UnitOut" if unit else "StridedOut"
    extra = "" if unit else f", {form.size(stride)}"
    pointer, offset = form.pointers[item.access.buffer], offset_text(form, item.access, where)
    storage = STORAGE_TYPES[item.dtype]
    return f"fw::{kind}<{storage}, V> {name}({pointer}, {offset}{extra});", name


def tile_lanes(form: Form, item: Load | Store) -> str:
    """An access's lanes in shared memory."""
    return f"tile.template of<{STORAGE_TYPES[item.dtype]}>({form.tiles[item]})"


def store_lines(
    form: Form, stores: Iterable[Store], element: bool, at: list[str], wide: bool = False
) -> tuple[list[str], list[str], list[str]]:
    """Declarations, assignments (of lane v) and writes of some stores."""
    heads, puts, writes = [], [], []
    for position, item in enumerate(stores):
        head, name = _out(form, position, item, element, at)
        heads.append(head)
        value = _unrounded(form, item) if element else form.names[item.value]
        if wide and item.dtype in HALF_DTYPES:
            heads.append(f"float {name}_wide[{run_text(form)}];")
            puts.append(f"{name}_wide[v] = {value};")
            writes.append(f"{name}.narrow({name}_wide, n);")
        else:
            puts.append(f"{name}.put(v, {value});")
        writes += [f"{name}.write();"] * (item not in form.tiles)
    return heads, puts, writes


def _unrounded(form: Form, item: Store) -> str:
    """The float32 value that a 16-bit store rounds itself. To round it earlier took a quarter of
    gelu's time on the host, and three instructions per element on a GPU."""
    if item.dtype not in HALF_DTYPES:
        return form.names[item.value]
    for made in form.kernel.body:
        if isinstance(made, Apply) and made.name == item.value and made.op == "cast":
            (source,) = made.operands
            # A row value has a local name only in functions that read it.
            at_hand = form.is_flat or form.plan.level.is_element[source]
            if made.dtype == item.dtype and form.dtypes[source] == "float32" and at_hand:
                return form.names[source]
    return form.names[item.value]


def goes_wide(form: Form, items: Iterable[Computed]) -> bool:
    """Whether 16-bit floats are converted in separate loops. bfloat16 with cheap operators is not:
    one loop is vectorised well."""
    applied = [item for item in items if isinstance(item, Apply)]
    costly = any(SCALAR_OPS[item.op].cost >= COSTLY for item in applied)
    has_fp16 = any(each.dtype == "float16" for each in form.kernel.arguments)
    return form.language == "host" and (costly or has_fp16)


def widened(form: Form, items: Iterable[Computed]) -> list[str]:
    """Statements that convert the 16-bit floats that these items load."""
    lines = []
    for item in items:
        if isinstance(item, Load) and item.dtype in HALF_DTYPES:
            name = form.names[item.name]
            lines.append(f"float {name}_wide[{run_text(form)}];")
            lines.append(f"elem.{name}.widen({name}_wide, n);")
    return lines


def loaded_slots(form: Form, items: Iterable[Computed]) -> dict[str, str]:
    """Pointers to loaded values whose lanes are contiguous and have the register type."""
    return {
        item.name: f"elem.{form.names[item.name]}.from"
        for item in items
        if isinstance(item, Load) and _is_plain(form, item)
    }


def stored_slots(form: Form, stores: Iterable[Store]) -> dict[str, str]:
    """Pointers to stored values whose lanes are contiguous and have the register type."""
    return {
        store.value: f"out_{at}.to" for at, store in enumerate(stores) if _is_plain(form, store)
    }


def _is_plain(form: Form, item: Load | Store) -> bool:
    plain = STORAGE_TYPES[item.dtype] == REGISTER_TYPES[item.dtype]
    contiguous = lane_stride(form, item.access, True) == ONE and not item.access.guards
    return plain and contiguous and form.language == "host" and item not in form.tiles


def element(form: Form, item: Computed, wide: bool) -> str:
    """The C++ object whose subscript v is lane v of a loaded element."""
    if isinstance(item, Load) and item in form.tiles:
        return tile_lanes(form, item)
    name = form.names[item.name]
    return f"{name}_wide" if wide and item.dtype in HALF_DTYPES else f"elem.{name}"
