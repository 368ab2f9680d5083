"""The members of a functor: its arguments, its constants and extents, and its structs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from fusewright.codegen.access import holder, is_strided, outside_lines, transposed_loads
from fusewright.codegen.divide import divisor_fields
from fusewright.codegen.form import Form, constants
from fusewright.codegen.lanes import Computed, indented, register_bytes
from fusewright.codegen.layout import filled
from fusewright.codegen.runs import lanes_of_run, pair_lines
from fusewright.codegen.text import literal, size_text
from fusewright.ir.graph import ONE, Dim, Ratio, product
from fusewright.ir.loop import Argument, Load
from fusewright.ir.operators import STORAGE_TYPES
from fusewright.schedule.sweeps import part_bytes


def members(form: Form) -> list[str]:
    """The data: pointers, sizes, and constants that are known when the sizes are."""
    lines = []
    for kind, pointers in groupby(form.kernel.arguments, _pointed):
        names = [form.pointers[each.name] for each in pointers]
        lines += filled(f"{kind} ", [f"*{each}" for each in names], ";", 98)
        if len(names) == 1:
            lines[-1] = f"{kind}* {names[0]};"
    lines += [f"I {name};" for name in form.symbols.values()]
    return lines + [f"{kind} {name};" for name, kind in late_constants(form).items()]


def _pointed(argument: Argument) -> str:
    const = "" if argument.is_output else "const "
    return f"{const}{STORAGE_TYPES[argument.dtype]}"


def late_constants(form: Form) -> dict[str, str]:
    """The types of the constants that are known when the sizes are."""
    late = (item for item in constants(form) if isinstance(item.value, Dim | Ratio))
    return {form.names[item.name]: form.register(item.name) for item in late}


def fixed_members(form: Form) -> dict[str, str]:
    """The constants that are known now, with their definitions."""
    found = {
        form.names[item.name]: f"static constexpr {form.register(item.name)} "
        f"{form.names[item.name]} = {literal(item.value, item.dtype)};"
        for item in constants(form)
        if not isinstance(item.value, Dim | Ratio)
    }
    return {**{line.split()[3]: line for line in outside_lines(form)}, **found}


def extents(form: Form) -> list[str]:
    """What drivers ask at compile time, and the sizes of the loops."""
    kernel = form.kernel
    axes = kernel.outer if form.is_flat else kernel.inner
    last = axes[-1].size if axes else ONE
    transposed = form.transposed if form.is_flat else form.transposed_inner
    rest = product(tuple(axis.size for at, axis in enumerate(axes[:-1]) if at != transposed))
    numbers = {} if form.is_flat else {"kPhases": form.plan.count}
    numbers |= _flat_numbers(form) if form.is_flat else _row_numbers(form)
    lines = _constants("bool", {key: str(flag).lower() for key, flag in _flags(form).items()})
    lines += _constants("int", {key: str(number) for key, number in numbers.items()})
    lines.append(_extents("FW_EXTENTS", form, last, rest))
    if not form.is_flat:
        outer_last = kernel.outer[-1].size if kernel.outer else ONE
        lines.append(_extents("FW_OUTER", form, kernel.outer_numel, outer_last, kernel.inner_numel))
    if transposed is not None:
        size = size_text(axes[transposed].size, form.symbols)
        lines.append(f"FW_FN I transposed_extent() const {{ return {size}; }}")
    return lines


def _flags(form: Form) -> dict[str, bool]:
    """What is so. The base of functors says that nothing is. Scans read their direction by name."""
    found = {key: True for key, flag in _all_flags(form).items() if flag}
    return found | ({"kBackward": form.scans[0].backward} if form.scans else {})


def _all_flags(form: Form) -> dict[str, bool]:
    kernel, schedule = form.kernel, form.schedule
    axes = kernel.outer if form.is_flat else kernel.inner
    flags = {"kRest": len(axes) > 1}
    if form.is_flat:
        if form.transposed is None:
            last = axes[-1].size if axes else ONE
            whole = last.is_static and last.factor % schedule.lanes == 0
            flags["kTail"] = not (
                schedule.flat or whole or last.divided_by(schedule.lanes) is not None
            )
            flags["kStrided"] = form.language == "host" and is_strided(form)
        return flags
    flags["kOuterRest"] = len(kernel.outer) > 1
    flags["kSplit"] = schedule.splits > 1
    flags["kByPosition"] = bool(form.given and form.positions)
    flags["kByTwo"] = form.language == "host" and bool(pair_lines(form))
    return flags


def _flat_numbers(form: Form) -> dict[str, int]:
    if form.language != "host" or form.transposed is not None:
        return {}
    items = [item for item in form.kernel.body if isinstance(item, Computed)]
    return {"kTransposed": len(transposed_loads(form)), "kRun": lanes_of_run(form, items)}


def _row_numbers(form: Form) -> dict[str, int]:
    numbers = {"kPartBytes": part_bytes(form.plan)}
    if form.language == "host":
        numbers["kKeptBytes"] = sum(register_bytes(form, name) for name in form.kept)
    return numbers


def _constants(kind: str, values: Mapping[str, str]) -> list[str]:
    """The definition of constants of one type."""
    fields = [(f"static constexpr {kind}", f"{key} = {value}") for key, value in values.items()]
    return grouped(fields, 98)


def _extents(macro: str, form: Form, *sizes: Dim) -> str:
    return f"{macro}({', '.join(size_text(size, form.symbols) for size in sizes)})"


def grouped(fields: Iterable[tuple[str, str]], room: int) -> list[str]:
    """Definitions of fields, those of one type in one line while it has room."""
    lines: list[str] = []
    kinds: list[str] = []
    for kind, name in fields:
        same = kinds and kinds[-1] == kind and not kind.endswith("*")
        if same and len(lines[-1]) + len(name) + 2 <= room:
            lines[-1] = f"{lines[-1][:-1]}, {name};"
        else:
            lines.append(f"{kind} {name};")
            kinds.append(kind)
    return lines


def struct(name: str, fields: Iterable[tuple[str, str]], template: str = "int V") -> list[str]:
    """A struct in a functor, with these types and names."""
    lines = grouped(fields, 96)
    head = [f"template <{template}>"] if template else []
    if not lines:
        return [*head, f"struct {name} {{}};"]
    return [*head, f"struct {name} {{", *indented(lines), "};"]


def elem_struct(form: Form, loads: list[Load]) -> list[str]:
    fields = [(holder(form, item, True, "V"), form.names[item.name]) for item in loads]
    if form.language == "cuda":
        fields += [(form.register(name), f"{form.names[name]}_kept[V]") for name in form.kept]
    return struct("Elem", fields)


def row_struct(form: Form) -> list[str]:
    index = "int" if form.positions else "I"
    fields = [(index, f"i{at}") for at in range(form.n_outer)]
    fields += [(form.register(name), f"{form.names[name]}[V]") for name in form.row_values]
    fields += divisor_fields(form)
    if form.language == "host":
        fields += [(f"{form.register(name)}*", f"{form.names[name]}_kept") for name in form.kept]
    return struct("Row", fields)
