"""Algebra on scalar operators. Each rule is one equation that keeps every bit, unless it says so.

Operands are in normal form: a number is the last one if it can be.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fusewright.ir.graph import FLOATS, INTEGERS, Arg, Node, Ref
from fusewright.rewrite.context import Context, needs_memory
from fusewright.rewrite.numbers import is_power_of_two, same_number

_WIDE = ("float32", "float64")


def _is(arg: Arg, value: float) -> bool:
    return isinstance(arg, int | float) and not isinstance(arg, bool) and same_number(arg, value)


def _dtype(context: Context, arg: Arg) -> str:
    return context.builder.spec(arg.name).dtype if isinstance(arg, Ref) else ""


def _made_by(context: Context, arg: Arg, op: str) -> Node | None:
    """The node behind an operand, if it is this operator."""
    node = context.producer(arg)
    return node if node is not None and node.op == op else None


def _itself(context: Context, node: Node, value: Arg) -> Ref | None:
    """`value` instead of the node, if they have one shape, dtype and layout and need no copy."""
    if not isinstance(value, Ref) or context.builder.spec(value.name) != node.spec:
        return None
    return None if needs_memory(context, node, value) else value


def times_one(context: Context, node: Node) -> Ref | None:
    """x · 1 = x, x / 1 = x, x - 0 = x"""
    left, right = node.args
    one = 0 if node.op == "sub" else 1
    return _itself(context, node, left) if _is(right, one) else None


def same_cast(context: Context, node: Node) -> Ref | None:
    """cast(x) = x if x has that dtype and layout"""
    return _itself(context, node, node.args[0])


def times_minus_one(context: Context, node: Node) -> Node | None:
    """x · -1 = -x"""
    floats = node.spec is not None and node.spec.dtype in FLOATS
    return replace(node, op="neg", args=node.args[:1]) if floats and _is(node.args[1], -1) else None


def minus_minus(context: Context, node: Node) -> Ref | None:
    """-(-x) = x"""
    inner = _made_by(context, node.args[0], "neg")
    return _itself(context, node, inner.args[0]) if inner is not None else None


def plus_negative(context: Context, node: Node) -> Node | None:
    """x + -y = x - y, -x + y = y - x, x - -y = x + y"""
    left, right = node.args
    second, first = (_made_by(context, each, "neg") for each in (right, left))
    if second is not None:
        return replace(node, op="add" if node.op == "sub" else "sub", args=(left, second.args[0]))
    if first is not None and node.op == "add":
        return replace(node, op="sub", args=(right, first.args[0]))
    return None


def one_over(context: Context, node: Node) -> Node | None:
    """1 / x is the reciprocal of x"""
    left, right = node.args
    floats = node.spec is not None and node.spec.dtype in FLOATS
    if not floats or not _is(left, 1) or not isinstance(right, Ref):
        return None
    return replace(node, op="reciprocal", args=(right,))


def over_power_of_two(context: Context, node: Node) -> Node | None:
    """x / 2^n = x · 2^-n"""
    left, right = node.args
    wide = node.spec is not None and node.spec.dtype in _WIDE
    if not wide or not isinstance(right, int | float) or not is_power_of_two(right):
        return None
    return replace(node, op="mul", args=(left, 1 / right))


def twice(context: Context, node: Node) -> Node | None:
    """x + x = 2 · x"""
    left, right = node.args
    floats = node.spec is not None and node.spec.dtype in FLOATS
    same = isinstance(left, Ref) and left == right
    return replace(node, op="mul", args=(left, 2.0)) if floats and same else None


_POWERS = {2: "mul", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal", 1: "cast"}


def small_power(context: Context, node: Node) -> Node | None:
    """Small powers are products, as in PyTorch: x² = x · x, x³ = x · x · x, x^½ = √x."""
    base, power = node.args
    assert node.spec is not None
    if not isinstance(base, Ref) or not isinstance(power, int | float):
        return None
    if power == 3:
        square = replace(node, name=f"{node.name}_square", op="mul", args=(base, base))
        return replace(node, op="mul", args=(context.builder.put(square), base))
    floats = node.spec.dtype in FLOATS or power in (1, 2)
    if power not in _POWERS or not floats:
        return None
    return replace(node, op=_POWERS[power], args=(base, base) if power == 2 else (base,))


def and_true(context: Context, node: Node) -> Ref | None:
    """c and true = c, c or false = c"""
    flag, other = node.args
    neutral = node.op == "logical_and"
    return _itself(context, node, flag) if other is neutral else None


def number_last(context: Context, node: Node) -> Node | None:
    """where(i < j, c, x) = where(i ≥ j, x, c) for integers"""
    condition, yes, no = node.args
    compared = context.producer(condition)
    if isinstance(yes, Ref) or not isinstance(no, Ref) or compared is None:
        return None
    flag = replace(compared, name=f"{compared.name}_not", op="logical_not", args=(condition,))
    opposite = not_compared(context, flag)
    if opposite is None:
        return None
    return replace(node, args=(context.builder.put(opposite), no, yes))


def above_zero(context: Context, node: Node) -> Node | None:
    """max(x, 0) = relu(x)"""
    left, right = node.args
    positive = isinstance(right, int | float) and right == 0 and math.copysign(1, right) > 0
    numeric = node.spec is not None and node.spec.dtype in (*FLOATS, *INTEGERS)
    if not positive or not numeric or not isinstance(left, Ref):
        return None
    return replace(node, op="relu", args=(left,))


def _logistic(context: Context, arg: Arg) -> Arg:
    """The x of 1 + e^-x, or None."""
    total = _made_by(context, arg, "add")
    if total is None or not _is(total.args[1], 1):
        return None
    power = _made_by(context, total.args[0], "exp")
    minus = _made_by(context, power.args[0], "neg") if power is not None else None
    return minus.args[0] if minus is not None else None


def sigmoid_by_hand(context: Context, node: Node) -> Node | None:
    """1 / (1 + e^-x) = sigmoid(x), without the overflow of e^-x; within rounding"""
    found = _logistic(context, node.args[0])
    return replace(node, op="sigmoid", args=(found,)) if found is not None else None


def swish_by_hand(context: Context, node: Node) -> Node | None:
    """x / (1 + e^-x) = x · sigmoid(x), without the overflow of e^-x; within rounding"""
    over, under = node.args
    found = _logistic(context, under)
    if found is None or found != over or not isinstance(under, Ref):
        return None
    gate = Node(f"{node.name}_gate", "sigmoid", (found,), (), node.spec, node.source)
    return replace(node, op="mul", args=(over, context.builder.put(gate)))


def known_choice(context: Context, node: Node) -> Ref | None:
    """where(true, x, y) = x, where(false, x, y) = y, where(c, x, x) = x"""
    condition, yes, no = node.args
    flag = context.number(condition)
    if isinstance(flag, bool | int):
        return _itself(context, node, yes if flag else no)
    return _itself(context, node, yes) if yes == no else None


def flag_by_choice(context: Context, node: Node) -> Node | Ref | None:
    """where(c, true, false) = c, and the same of a comparison of 1 and 0 with 0"""
    chosen = node if node.op == "where" else context.producer(node.args[0])
    if chosen is None or chosen.op != "where" or node.spec is None or node.spec.dtype != "bool":
        return None
    condition, *sides = chosen.args
    numbers = [context.number(side) for side in sides]
    flags = [bool(each) for each in numbers if isinstance(each, int | float)]
    asked = node.op in ("where", "cast", "ne", "eq")
    if len(flags) < 2 or flags[0] == flags[1] or not asked or not isinstance(condition, Ref):
        return None
    if node.op in ("ne", "eq") and not _is(node.args[1], 0):
        return None
    if flags[0] != (node.op == "eq"):
        return _itself(context, node, condition)
    return replace(node, op="logical_not", args=(condition,))


_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def not_compared(context: Context, node: Node) -> Node | None:
    """not a < b is a ≥ b for integers; not a = b is a ≠ b for all numbers"""
    inner = context.producer(node.args[0])
    if inner is None or inner.op not in _OPPOSITE:
        return None
    whole = all(_dtype(context, arg) in ("", *INTEGERS, "bool") for arg in inner.args)
    if not whole and inner.op not in ("eq", "ne"):
        return None
    return replace(node, op=_OPPOSITE[inner.op], args=inner.args)


# a - b ≥ 1 is a > b, a - b ≤ -1 is a < b, and so on.
_WITHOUT_ONE = {("ge", 1): "gt", ("lt", 1): "le", ("le", -1): "lt", ("gt", -1): "ge"}


def compared_difference(context: Context, node: Node) -> Node | None:
    """a - b < 0 is a < b, for indices, whose differences do not overflow"""
    difference = _made_by(context, node.args[0], "sub")
    limit = node.args[1]
    if difference is None or not isinstance(limit, int) or not _are_indices(context, difference):
        return None
    op = node.op if limit == 0 else _WITHOUT_ONE.get((node.op, limit))
    return replace(node, op=op, args=difference.args) if op is not None else None


def _are_indices(context: Context, node: Node) -> bool:
    sources = [context.producer(Ref(context.memory_of(Ref(name)))) for name in node.refs()]
    wide = all(_dtype(context, arg) in ("int32", "int64") for arg in node.args)
    return wide and all(each is not None and each.op == "iota" for each in sources)


def cast_index(context: Context, node: Node) -> Node | None:
    """cast(0, 1, …) counts in the other dtype"""
    index = _made_by(context, node.args[0], "iota")
    if index is None or index.spec is None or node.spec is None:
        return None
    wide = index.spec.dtype in ("int32", "int64") and node.spec.dtype in (*_WIDE, "int64")
    return replace(node, op="iota", args=index.args) if wide else None
