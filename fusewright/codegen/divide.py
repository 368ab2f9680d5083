"""Division on a GPU by a divisor that many elements share: a constant, or a row value.

nvcc's division takes about ten instructions and a branch, and the branch keeps nvcc from working on
several elements at once. A `fw::CommonDivisor` contains its reciprocal. Division by it takes eight
instructions and no branch, and gives the same bits. If only 16 bits are stored, two instructions
are enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fusewright.codegen.form import Form, constants
from fusewright.ir.graph import Dim, Ratio
from fusewright.ir.loop import Apply, Constant, Instruction


def divisors(form: Form) -> tuple[str, ...]:
    """The row values by which elements are divided, in the body's order."""
    is_element, fixed = form.plan.level.is_element, {each.name for each in constants(form)}
    applied = [item for item in form.kernel.body if isinstance(item, Apply)]
    found = {
        item.operands[1]: None
        for item in applied
        if _divides_floats(form, item) and is_element[item.name]
    }
    return tuple(name for name in found if not is_element[name] and name not in fixed)


def _divides_floats(form: Form, item: Apply) -> bool:
    return item.op == "div" and form.language == "cuda" and form.register(item.name) == "float"


def division(form: Form, item: Apply) -> str:
    """The call that divides with a known reciprocal, or "" if there is none."""
    if not _divides_floats(form, item):
        return ""
    by = item.operands[1]
    divisor = f"{form.names[by]}_divisor"
    if by not in divisors(form) or not form.plan.level.is_element[item.name]:
        if not any(each.name == by and _gains(each) for each in constants(form)):
            return ""
        divisor = f"fw::CommonDivisor({form.names[by]})"
    name = "approximate_div" if item.name in form.half_precision else "div"
    return f"fw::{name}({form.names[item.operands[0]]}, {divisor})"


def _gains(constant: Constant) -> bool:
    """Whether the compiler knows the reciprocal, and the division is not exact as a multiplication
    (as it is for powers of two)."""
    value = constant.value
    if isinstance(value, Dim | Ratio):
        return False
    return abs(math.frexp(value)[0]) != 0.5


def divisor_fields(form: Form) -> list[tuple[str, str]]:
    """The types and names of the divisors in the row struct."""
    return [("fw::CommonDivisor", f"{form.names[name]}_divisor[V]") for name in divisors(form)]


def divisor_made(form: Form, name: str) -> list[str]:
    """The statement that stores lane v of a row value as a divisor, if it is one."""
    own = form.names[name]
    return [f"row.{own}_divisor[v] = fw::CommonDivisor({own});"] * (name in divisors(form))


def divisor_aliases(form: Form, items: Iterable[Instruction], lane: str) -> list[str]:
    """Local names for the divisors of these instructions."""
    wanted = {item.operands[1] for item in items if isinstance(item, Apply) and item.op == "div"}
    names = [f"{form.names[name]}_divisor" for name in divisors(form) if name in wanted]
    return [f"const fw::CommonDivisor {name} = row.{name}[{lane}];" for name in names]
