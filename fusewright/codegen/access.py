"""Reads and writes of a run of lanes: which holder an access takes, and how half floats go wide.

On the host, half floats beside a costly operator are converted in loops of their own: g++ does not
vectorise a loop over two widths well (gelu: 2 to 50 times eager's time).
"""

from __future__ import annotations

from collections.abc import Iterable

from fusewright.codegen.form import Form, linear_text, offset_text
from fusewright.codegen.lanes import Computed, function_lines, run_text
from fusewright.codegen.text import literal
from fusewright.ir.graph import HALVES, ONE, ZERO, Dim
from fusewright.ir.loop import Access, Apply, Load, Store
from fusewright.ir.operators import REGISTER_TYPES, SCALAR_OPS, STORAGE_TYPES
from fusewright.schedule.vector_width import lane_accesses, lane_axis

COSTLY = 12

NEAR_STRIDE = 8  # elements; closer lanes share lines of memory within a run already
MOST_TURNED = 8  # each takes 8 KB of stack, and g++ a quarter of a second


def is_strided(form: Form) -> bool:
    """Whether neighbouring lanes of some access are far apart, while another axis could be near."""
    accesses = lane_accesses(form.kernel, form.schedule.kind)
    strides = [lane_stride(form, each, True) for each in accesses]
    far = any(abs(each.factor) > NEAR_STRIDE or (each.symbols and each.factor) for each in strides)
    return len(form.kernel.outer) > 1 and far


def turned_loads(form: Form) -> list[Load]:
    """Loads far apart along the lanes, but side by side along the axis before: the host's tiles
    turn them."""
    if form.language != "host" or form.schedule.kind != "pointwise" or not is_strided(form):
        return []
    if _guarded_loads(form):  # of which a thread holds one run at a time
        return []
    beside = len(form.kernel.outer) - 2
    found = [
        item
        for item in form.kernel.body
        if isinstance(item, Load)
        and item.access.strides[beside] == ONE
        and lane_stride(form, item.access, True) not in (ZERO, ONE)
    ]
    return found[:MOST_TURNED]


def turn_lines(form: Form) -> list[str]:
    """Brings what lies across the lanes of some rows into memory where it lies along them."""
    lines = [
        f"fw::turn(elem, &Elem<V>::{form.names[item.name]}, rows, n, "
        f"memory + {at} * fw::kTurnedBytes);"
        for at, item in enumerate(turned_loads(form))
    ]
    return function_lines("int V", "turn(Elem<V>* elem, int rows, int n, char* memory)", lines)


def lane_stride(form: Form, access: Access, element: bool) -> Dim:
    """The stride from one lane to the next."""
    axis = _own_lanes(form, element)
    return ZERO if axis is None else access.strides[axis]


def holder(form: Form, item: Load, element: bool, lanes: str) -> str:
    if item.name == form.given:
        return f"fw::Given<{REGISTER_TYPES[item.dtype]}, {lanes}>"
    stride = lane_stride(form, item.access, element)
    kind = "Same" if stride == ZERO else "Unit" if stride == ONE else "Strided"
    if kind == "Strided" and item in turned_loads(form):
        kind = "Turned"
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
    """The values of guarded loads where there is no element."""
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
    """How far each guard's index moves from one lane to the next."""
    axis = _own_lanes(form, element)
    return [ZERO if axis is None else guard.steps[axis] for guard in item.access.guards]


def _own_lanes(form: Form, element: bool) -> int | None:
    """The axis that a load's lanes lie along; a row value of a row schedule has one lane."""
    return None if form.is_row and not element else lane_axis(form.kernel, form.schedule.kind)


def _bounds(form: Form, item: Load, element: bool, at: list[str]) -> list[str]:
    """What a guarded load takes beside its place: the value outside, on the host how many lanes
    there are, and what inside means."""
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
    """How many lanes a run of the host has from here on."""
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
    """Declarations, puts (in lane v) and writes of some stores."""
    heads, puts, writes = [], [], []
    for position, item in enumerate(stores):
        head, name = _out(form, position, item, element, at)
        heads.append(head)
        value = _unrounded(form, item) if element else form.names[item.value]
        if wide and item.dtype in HALVES:
            heads.append(f"float {name}_wide[{run_text(form)}];")
            puts.append(f"{name}_wide[v] = {value};")
            writes.append(f"{name}.narrow({name}_wide, n);")
        else:
            puts.append(f"{name}.put(v, {value});")
        writes += [f"{name}.write();"] * (item not in form.tiles)
    return heads, puts, writes


def _unrounded(form: Form, item: Store) -> str:
    """The float that a store of halves rounds; rounding it before took a quarter of gelu's time on
    the host, and three instructions an element on a GPU."""
    if item.dtype not in HALVES:
        return form.names[item.value]
    for made in form.kernel.body:
        if isinstance(made, Apply) and made.name == item.value and made.op == "cast":
            (source,) = made.operands
            # A row's values have names of their own only where they are asked for.
            at_hand = form.is_flat or form.plan.level.is_element[source]
            if made.dtype == item.dtype and form.dtypes[source] == "float32" and at_hand:
                return form.names[source]
    return form.names[item.value]


def goes_wide(form: Form, items: Iterable[Computed]) -> bool:
    """Whether half floats are converted apart; bfloat16 and cheap operators share a loop well."""
    applied = [item for item in items if isinstance(item, Apply)]
    costly = any(SCALAR_OPS[item.op].cost >= COSTLY for item in applied)
    halves = any(each.dtype == "float16" for each in form.kernel.arguments)
    return form.language == "host" and (costly or halves)


def widened(form: Form, items: Iterable[Computed]) -> list[str]:
    """Loops that convert the half floats that these items load."""
    lines = []
    for item in items:
        if isinstance(item, Load) and item.dtype in HALVES:
            name = form.names[item.name]
            lines.append(f"float {name}_wide[{run_text(form)}];")
            lines.append(f"elem.{name}.widen({name}_wide, n);")
    return lines


def loaded_places(form: Form, items: Iterable[Computed]) -> dict[str, str]:
    """Where the lanes of loaded values lie side by side in the type of registers."""
    return {
        item.name: f"elem.{form.names[item.name]}.from"
        for item in items
        if isinstance(item, Load) and _is_plain(form, item)
    }


def stored_places(form: Form, stores: Iterable[Store]) -> dict[str, str]:
    """Where the lanes of stored values come to lie so."""
    return {
        store.value: f"out_{at}.to" for at, store in enumerate(stores) if _is_plain(form, store)
    }


def _is_plain(form: Form, item: Load | Store) -> bool:
    plain = STORAGE_TYPES[item.dtype] == REGISTER_TYPES[item.dtype]
    beside = lane_stride(form, item.access, True) == ONE and not item.access.guards
    return plain and beside and form.language == "host" and item not in form.tiles


def element(form: Form, item: Computed, wide: bool) -> str:
    """Where lane v of a loaded element is found."""
    if isinstance(item, Load) and item in form.tiles:
        return tile_lanes(form, item)
    name = form.names[item.name]
    return f"{name}_wide" if wide and item.dtype in HALVES else f"elem.{name}"
