"""Arithmetic on numbers that are known before a kernel runs, rounded as its dtype rounds.

Only operators whose result is exact or rounded once are computed here. So a kernel that reads the
result has the same bits as one that computes it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping

from fusewright.ir.graph import FLOATS, HALF_DTYPES, INTEGERS, Arg
from fusewright.ir.rounding import rounded

Number = int | float | bool
# Double has more than twice the digits of float32, so rounding its quotients again is harmless.
_EXACT = ("float32", "float64")


def is_number(arg: Arg) -> bool:
    """Whether an argument is a number; sizes with symbols are not."""
    return isinstance(arg, int | float)


def same_number(left: Number, right: Number) -> bool:
    """Whether two numbers are equal, zeros by sign, and NaN equal to itself."""
    return repr(float(left)) == repr(float(right)) and (left == right or left != left)


def held(value: Number, dtype: str) -> Number | None:
    """The number as a tensor of this dtype holds it; None if it does not fit an integer type."""
    if dtype == "bool":
        return bool(value)
    if dtype in FLOATS:
        return rounded(float(value), dtype)
    if dtype not in INTEGERS or not math.isfinite(value):
        return None
    bits, signed = int(dtype.lstrip("uint")), not dtype.startswith("u")
    least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    whole = int(value)
    return whole if least <= whole <= most else None


_FOLDED: Mapping[str, Callable[..., Number]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "abs": abs,
    "sqrt": math.sqrt,
    "reciprocal": lambda x: 1.0 / x,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "logical_not": operator.not_,
}
_OF_FLOATS = ("div", "sqrt", "reciprocal")


def folded(op: str, args: tuple[Number, ...], kind: str, result: str) -> Number | None:
    """The operator's value for operands of dtype `kind`; None if it is not known to the bit."""
    if op == "cast":
        value = held(args[0], kind)
        # 16-bit kernels compute in float32: there a number keeps its digits, as in eager mode.
        return value if value is None or result in HALF_DTYPES else held(value, result)
    if op not in _FOLDED or not (kind in _EXACT or kind in INTEGERS):
        return None
    if op in _OF_FLOATS and kind not in _EXACT:
        return None
    operands = [held(each, kind) for each in args]
    if None in operands:
        return None
    try:
        value = _FOLDED[op](*operands)
    except (ArithmeticError, ValueError):
        return None
    return held(value, result)


def in_kind(value: Number, dtype: str) -> Number:
    """A number written as the dtype writes it: 2 next to floats is 2.0, and of all numbers that
    are one float32 the shortest stands for them."""
    if isinstance(value, bool):
        return value
    if dtype in FLOATS and abs(value) < 2**53:
        return _shortest(float(value)) if dtype == "float32" else float(value)
    whole = dtype in INTEGERS and math.isfinite(value) and int(value) == value
    return int(value) if whole else value


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32."""
    single = rounded(value, "float32")
    if not math.isfinite(single) or value == float(f"{value:.6g}"):  # six digits are distinct
        return value
    tries = (float(f"{single:.{digits}g}") for digits in range(1, 10))
    return next((each for each in tries if rounded(each, "float32") == single), single)


def is_power_of_two(value: Number) -> bool:
    """Whether multiplying by it only moves the exponent, in float32 and wider types."""
    if isinstance(value, bool) or not math.isfinite(value) or value == 0:
        return False
    fraction, exponent = math.frexp(value)
    return abs(fraction) == 0.5 and abs(exponent - 1) <= 126
