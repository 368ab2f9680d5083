"""Division on a GPU by what many elements are divided by: a constant, or a value of the row.

nvcc's division takes about ten instructions and a branch, which keeps it from working on several
elements at once. A `fw::CommonDivisor` has its reciprocal with it: dividing by it takes eight
instructions and no branch, and gives the same bits; two where 16 bits are all that is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fusewright.codegen.form import Form, constants
from fusewright.ir.graph import Dim, Ratio
from fusewright.ir.loop import Apply, Constant, Instruction


def divisors(form: Form) -> tuple[str, ...]:
    """The row values that elements are divided by, in the body's order."""
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
    """The call that divides by a reciprocal, where one is at hand; else nothing."""
    if not _divides_floats(form, item):
        return ""
    by = item.operands[1]
    divisor = f"{form.names[by]}_divisor"
    if by not in divisors(form) or not form.plan.level.is_element[item.name]:
        if not any(each.name == by and _gains(each) for each in constants(form)):
            return ""
        divisor = f"fw::CommonDivisor({form.names[by]})"
    name = "coarse_div" if item.name in form.coarse else "div"
    return f"fw::{name}({form.names[item.operands[0]]}, {divisor})"


def _gains(constant: Constant) -> bool:
    """Whether the compiler knows the reciprocal, and division by it is no mere product."""
    value = constant.value
    if isinstance(value, Dim | Ratio):
        return False
    return abs(math.frexp(value)[0]) != 0.5


def divisor_fields(form: Form) -> list[str]:
    """Their places in a row."""
    return [f"fw::CommonDivisor {form.names[name]}_divisor[V];" for name in divisors(form)]


def divisor_made(form: Form, name: str) -> list[str]:
    """A row value that is known in lane v, made a divisor if it is one."""
    own = form.names[name]
    return [f"row.{own}_divisor[v] = fw::CommonDivisor({own});"] * (name in divisors(form))


def divisor_aliases(form: Form, items: Iterable[Instruction], lane: str) -> list[str]:
    """Local names for those that these instructions divide by."""
    wanted = {item.operands[1] for item in items if isinstance(item, Apply) and item.op == "div"}
    names = [f"{form.names[name]}_divisor" for name in divisors(form) if name in wanted]
    return [f"const fw::CommonDivisor {name} = row.{name}[{lane}];" for name in names]
