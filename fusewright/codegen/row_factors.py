"""Values of an epilogue that depend on the row alone, such as a batch norm's factor of a channel.

They are the same for all columns. So the kernel computes them once and keeps them beside its tile.
"""

from __future__ import annotations

from fusewright.codegen.access import holder, read
from fusewright.codegen.form import Form, all_coordinates, decompose
from fusewright.codegen.lanes import (
    Computed,
    computed,
    function_lines,
    loaded_name,
    used,
)
from fusewright.codegen.members import struct
from fusewright.ir.loop import Apply, Load, Reduce, Store


def factor_parts(form: Form) -> list[list[str]]:
    """The struct of the factors that other values need, and the function that computes them."""
    if not form.has_factors:
        return []
    found = form.factors
    if not found:
        return []
    kept = _needed_by_others(form)
    fields = [(form.register(item.name), form.names[item.name]) for item in kept]
    at = all_coordinates(form, "row.")
    lines = []
    for item in found:
        if isinstance(item, Load):
            held = loaded_name(form, item)
            lines += [f"{holder(form, item, True, 'V')} {held};", read(form, item, True, held, at)]
    lines += ["constexpr int v = 0;"] * bool(lines)
    lines += [computed(form, item, loaded_name(form, item), at) for item in found]
    lines += [f"factors.{form.names[item.name]} = {form.names[item.name]};" for item in kept]
    heads = used(decompose(form, form.kernel.inner, "j", ""), lines)
    compute = function_lines("int V", "compute(Factors& factors, I q, I l)", heads + lines)
    return [struct("Factors", fields, ""), compute]


def _needed_by_others(form: Form) -> list[Computed]:
    own = {item.name for item in form.factors}
    made = {item.name: item for item in form.kernel.body if isinstance(item, Apply)}
    needed: set[str] = set()
    for item in form.kernel.body:
        match item:
            case Apply() if item.name not in own:
                needed.update(item.operands)
            case Reduce():
                needed.add(item.operand)
            case Store():  # A store may round the operand of a cast itself.
                needed.add(item.value)
                needed.update(made[item.value].operands if item.value in made else ())
    return [item for item in form.factors if item.name in needed]


def factor_aliases(form: Form, lines: list[str]) -> list[str]:
    """Local names for the factors that these lines mention."""
    kept = _needed_by_others(form)
    heads = [
        f"const {form.register(item.name)} {form.names[item.name]} = "
        f"factors.{form.names[item.name]};"
        for item in kept
    ]
    return used(heads, lines)
