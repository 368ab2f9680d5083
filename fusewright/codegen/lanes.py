"""Loops over the lanes of a vector or run: the statements that compute a value in lane v.

Some operators are branch-free only for usual arguments (`ScalarOp.near`). On the host they get a
test of all lanes and two loops. A CUDA thread just branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fusewright.codegen.divide import division
from fusewright.codegen.form import Form, index_text
from fusewright.codegen.heads import head
from fusewright.codegen.layout import COLUMNS
from fusewright.ir.graph import HALF_DTYPES, ITEM_BYTES
from fusewright.ir.loop import Apply, Index, Load, Scan
from fusewright.ir.operators import REGISTER_TYPES, SCALAR_OPS, STORAGE_TYPES

Computed = Load | Index | Apply | Scan


def indented(lines: Iterable[str], by: int = 2) -> list[str]:
    """The lines, moved to the right. Directives begin in the first column."""
    return [" " * by + line if line and line[0] != "#" else line for line in lines]


def run_text(form: Form) -> str:
    """The largest number of lanes of a host run."""
    return "kRun" if form.schedule.kind == "pointwise" else "V"


def lane_loop(lines: list[str]) -> list[str]:
    return ["FW_LANES(v, V, n) {", *indented(lines), "}"] if lines else []


def applied(form: Form, item: Apply, near: bool = False) -> str:
    """The call of an operator."""
    arguments = ", ".join(form.names[name] for name in item.operands)
    if by_reciprocal := division(form, item):
        return by_reciprocal
    if (
        item.op == "exp"
        and item.name in form.half_precision
        and form.register(item.name) == "float"
    ):
        return f"fw::approximate_exp({arguments})"
    if item.op != "cast":
        tag = "fw::Near{}, " if near and _has_near(form, item) else ""
        return f"fw::{item.op}({tag}{arguments})"
    if item.dtype in HALF_DTYPES:
        return f"fw::rounded<{STORAGE_TYPES[item.dtype]}>({arguments})"
    return f"fw::cast<{form.register(item.name)}>({arguments})"


def loaded_name(form: Form, item: Computed) -> str:
    """A local name for a loaded value. Names that come from a model never end with "_"."""
    return f"{form.names[item.name]}_"


def computed(form: Form, item: Computed, held: str, at: list[str], near: bool = False) -> str:
    """One statement that defines a value in lane v."""
    match item:
        case Load():
            plain = STORAGE_TYPES[item.dtype] == REGISTER_TYPES[item.dtype]
            right = f"{held}[v]" if plain or held.endswith("_wide") else f"fw::value({held}[v])"
        case Index():
            right = f"fw::cast<{form.register(item.name)}>({index_text(form, item, at)})"
            if item.size is not None:
                right = f"fw::inside<I>({index_text(form, item, at)}, {item.size})"
        case Apply():
            right = applied(form, item, near)
        case Scan():
            right = f"scanned.{form.names[item.name]}_lanes.at[v]"
    return f"const {form.register(item.name)} {form.names[item.name]} = {right};"


def is_staged(form: Form, items: Iterable[Computed]) -> bool:
    """Whether a run of lanes needs more than one loop."""
    applied = [item for item in items if isinstance(item, Apply)]
    return any(_has_near(form, item) or has_run(form, item) for item in applied)


def _has_near(form: Form, item: Apply) -> bool:
    floating = form.register(item.name) in ("float", "double")
    near = SCALAR_OPS[item.op].near and floating
    return form.language == "host" and near and not has_run(form, item)


def has_run(form: Form, item: Apply) -> bool:
    """Whether the host computes this operator for a whole run of lanes in one call."""
    dtype = {"float": "float32", "double": "float64"}.get(form.register(item.name))
    return form.language == "host" and dtype in SCALAR_OPS[item.op].run


def guarded_loops(
    form: Form,
    items: list[Computed],
    compute: Callable[[Computed, bool], list[str]],
    before: list[str],
    after: list[str],
    read_back: frozenset[str] = frozenset(),
) -> list[str]:
    """`before`, the items and `after` for every lane. Values that are read back need no test."""
    tests = [
        item
        for item in items
        if isinstance(item, Apply) and _has_near(form, item) and item.name not in read_back
    ]

    def loop(near: bool) -> list[str]:
        return lane_loop([*before, *(line for i in items for line in compute(i, near)), *after])

    if not tests:
        return loop(False)
    operands = _operands(items, tests)
    found = [line for item in operands for line in compute(item, True)]
    for item in tests:
        arguments = ", ".join(form.names[name] for name in item.operands)
        found.append(f"far |= fw::{item.op}_far({arguments});")
    return [
        "int32_t far = 0;",
        *lane_loop([*before, *found]),
        "if (far == 0) {",
        *indented(loop(True)),
        "} else {",
        *indented(loop(False)),
        "}",
    ]


def _operands(items: list[Computed], tests: list[Apply]) -> list[Computed]:
    """The items from which the tests' operands are computed, in order."""
    live = {name for item in tests for name in item.operands}
    for item in reversed(items):
        if isinstance(item, Apply) and item.name in live:
            live.update(item.operands)
    return [item for item in items if item.name in live]


def kept_slot(form: Form, name: str) -> str:
    """Lane v of a kept value: in memory on the host, in the element's registers on a GPU."""
    return f"{'elem.' if form.language == 'cuda' else ''}{form.names[name]}_kept[v]"


def kept_slots(form: Form, items: Iterable[Computed]) -> list[str]:
    """Pointers to this run's part of the kept values in memory (host only)."""
    if form.language == "cuda":
        return []
    return [
        f"{form.register(item.name)}* const {form.names[item.name]}_kept = "
        f"row.{form.names[item.name]}_kept + (q * lane_extent() + l);"
        for item in items
        if item.name in form.kept
    ]


def register_bytes(form: Form, name: str) -> int:
    dtype = form.dtypes[name]
    return 4 if dtype in HALF_DTYPES else ITEM_BYTES[dtype]


def used(heads: list[str], lines: Iterable[str]) -> list[str]:
    """The definitions `const I x = …;` whose names the lines mention."""
    mentioned = words(lines)
    return [head for head in heads if head.split()[2] in mentioned]


def words(lines: Iterable[str]) -> set[str]:
    """The names that the lines mention."""
    return set(" ".join(lines).replace(".", " . ").translate(_SPLIT).split())


_SPLIT = str.maketrans(dict.fromkeys("()[]{}+-*/%,;<>=:", " "))


def function_lines(template: str, signature: str, lines: list[str]) -> list[str]:
    """A function of a functor."""
    return braced(head(template, signature), lines)


def braced(head: Sequence[str], lines: Sequence[str], indent: int = 2) -> list[str]:
    """A function, whose head ends with a bracket. A single statement stands on the same line, if
    that is short enough. The text will be indented by `indent`."""
    if not lines:
        return [*head[:-1], f"{head[-1]}}}"]
    (statement, *others), (*template, last) = lines, head
    short = f"{last} {statement} }}"
    alone = not others and statement.endswith(";") and "{" not in statement
    simple = alone and not statement.startswith(("FW_LANES", "if "))
    if simple and not template and len(short) + indent <= COLUMNS:
        return [short]
    return [*head, *indented(lines), "}"]
