"""ATen's pointwise operators in terms of the operator table. Rules are data if possible.

`SIMPLE` maps an operator to (op, rule): arith computes in the result's dtype, compare in the
operands' common dtype, logic on booleans. Other operators have a function in `SPECIAL`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusewright.ir.graph import INTEGERS, Arg, Node, Ref
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.dtypes import result_type

CLASS_INDEX = "fusewright.class_index.default"
_UNARY = """
    neg abs sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos
    atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid relu ceil floor
    round trunc frac bitwise_not
""".split()
_BINARY = """
    mul atan2 maximum minimum fmax fmin hypot copysign remainder fmod bitwise_and bitwise_or
    bitwise_xor
""".split()
_COMPARE = "eq ne lt le gt ge".split()
_LOGIC = "logical_and logical_or logical_xor".split()

SIMPLE: dict[str, tuple[str, str]] = {
    **{f"aten.{op}.default": (op, "arith") for op in (*_UNARY, *_BINARY)},
    **{f"aten.{op}.{kind}": (op, "arith") for op in _BINARY for kind in ("Tensor", "Scalar")},
    **{f"aten.{op}.{kind}": (op, "compare") for op in _COMPARE for kind in ("Tensor", "Scalar")},
    **{f"aten.{op}.default": (op, "logic") for op in _LOGIC},
    "aten.logical_not.default": ("logical_not", "logic"),
    "aten.isnan.default": ("isnan", "compare"),
    "aten.isinf.default": ("isinf", "compare"),
    "aten.signbit.default": ("signbit", "compare"),
    "aten.div.Tensor": ("div", "arith"),
    "aten.div.Scalar": ("div", "arith"),
    "aten.floor_divide.default": ("floor_divide", "arith"),
    "aten.floor_divide.Scalar": ("floor_divide", "arith"),
    "aten.remainder.Scalar_Tensor": ("remainder", "arith"),
    "aten.bitwise_left_shift.Tensor": ("shift_left", "arith"),
    "aten.bitwise_left_shift.Tensor_Scalar": ("shift_left", "arith"),
    "aten.bitwise_right_shift.Tensor": ("shift_right", "arith"),
    "aten.bitwise_right_shift.Tensor_Scalar": ("shift_right", "arith"),
    "aten.special_erf.default": ("erf", "arith"),
    "aten.pow.Tensor_Scalar": ("pow", "arith"),
    "aten.pow.Tensor_Tensor": ("pow", "arith"),
    "aten.pow.Scalar": ("pow", "arith"),
}
# Of integers on a CPU, PyTorch raises an error where the divisor is zero.
_DIVISIONS = frozenset(
    "aten.floor_divide.default aten.floor_divide.Scalar aten.div.Tensor_mode aten.div.Scalar_mode "
    "aten.remainder.Tensor aten.remainder.Scalar aten.remainder.Scalar_Tensor aten.fmod.Tensor "
    "aten.fmod.Scalar".split()
)


def divides_integers_on_cpu(node: Node) -> bool:
    spec = node.spec
    return (
        node.op in _DIVISIONS
        and spec is not None
        and spec.device == "cpu"
        and spec.dtype in INTEGERS
    )


def may_divide_by_zero(builder: Builder, node: Node) -> bool:
    """Whether it divides integers on a CPU by numbers of which some may be zero."""
    if not divides_integers_on_cpu(node):
        return False
    divisor: Arg = node.args[1]
    if isinstance(divisor, Ref):
        divisor = builder.known.numbers.get(divisor.name)
    return not isinstance(divisor, int) or divisor == 0


def lower_simple(builder: Builder, node: Node) -> Ref:
    op, rule = SIMPLE[node.op]
    return apply(builder, node, op, rule, node.args)


def apply(builder: Builder, node: Node, op: str, rule: str, args: tuple[Arg, ...]) -> Ref:
    assert node.spec is not None
    result = node.spec.dtype
    match rule:
        case "arith":
            compute = result
        case "compare":
            compute = result_type(builder, args)
        case _:
            compute = "bool"
    operands = tuple(_as(builder, node, arg, compute) for arg in args)
    return builder.point(node, op, operands, result)


def _as(builder: Builder, node: Node, arg: Arg, dtype: str) -> Arg:
    return builder.cast(node, arg, dtype) if isinstance(arg, Ref) else arg


def _add_or_sub(op: str) -> Callable[[Builder, Node], Ref]:
    def lower(builder: Builder, node: Node) -> Ref:
        """a ± alpha·b"""
        assert node.spec is not None
        left, right = node.args[0], node.args[1]
        alpha = node.argument("alpha", 2, 1)
        if alpha not in (1, 1.0):
            right = _as(builder, node, right, node.spec.dtype)
            right = builder.point(node, "mul", (right, alpha), node.spec.dtype)
        if node.spec.dtype == "bool":
            return apply(builder, node, "logical_or", "logic", (left, right))
        return apply(builder, node, op, "arith", (left, right))

    return lower


def _rsub(builder: Builder, node: Node) -> Ref:
    return apply(builder, node, "sub", "arith", (node.args[1], node.args[0]))


def _div_mode(builder: Builder, node: Node) -> Ref:
    mode = node.argument("rounding_mode", 2)
    op = {None: "div", "floor": "floor_divide", "trunc": "trunc_divide"}[
        str(mode) if mode else None
    ]
    return apply(builder, node, op, "arith", node.args[:2])


def _clamp(low_at: int | None, high_at: int | None) -> Callable[[Builder, Node], Ref]:
    def lower(builder: Builder, node: Node) -> Ref:
        """min(max(x, low), high); NaN stays NaN, and high wins over low."""
        low = node.argument("min", low_at) if low_at else None
        high = node.argument("max", high_at) if high_at else None
        value: Arg = node.args[0]
        if low is not None:
            value = apply(builder, node, "maximum", "arith", (value, low))
        if high is not None:
            value = apply(builder, node, "minimum", "arith", (value, high))
        assert isinstance(value, Ref)
        return value

    return lower


def _where(builder: Builder, node: Node) -> Ref:
    assert node.spec is not None
    condition = _as(builder, node, node.args[0], "bool")
    sides = tuple(_as(builder, node, arg, node.spec.dtype) for arg in node.args[1:3])
    return builder.point(node, "where", (condition, *sides), node.spec.dtype)


def _cast(builder: Builder, node: Node) -> Ref:
    """A copy in the result's dtype and layout; it stays a node, so that memory is not shared."""
    assert node.spec is not None
    return builder.point(node, "cast", node.args[:1], node.spec.dtype)


def _copy(builder: Builder, node: Node) -> Ref:
    """copy(self, src): src broadcast to self's shape, in self's dtype."""
    assert node.spec is not None
    source = node.args[1]
    assert isinstance(source, Ref)
    if builder.spec(source.name).shape != node.spec.shape:
        spec = replace(node.spec, dtype=builder.spec(source.name).dtype)
        args = (source, spec.shape)
        source = builder.add(Node(node.name, "aten.expand.default", args, (), spec, node.source))
    return builder.point(node, "cast", (source,), node.spec.dtype)


def _class_index(builder: Builder, node: Node) -> Ref:
    assert node.spec is not None
    return builder.point(node, "class_index", node.args, node.spec.dtype)


SPECIAL: dict[str, Callable[[Builder, Node], Ref | None]] = {
    "aten.add.Tensor": _add_or_sub("add"),
    "aten.add.Scalar": _add_or_sub("add"),
    "aten.sub.Tensor": _add_or_sub("sub"),
    "aten.sub.Scalar": _add_or_sub("sub"),
    "aten.rsub.Scalar": _rsub,
    "aten.div.Tensor_mode": _div_mode,
    "aten.div.Scalar_mode": _div_mode,
    "aten.clamp.default": _clamp(1, 2),
    "aten.clamp.Tensor": _clamp(1, 2),
    "aten.clamp_min.default": _clamp(1, None),
    "aten.clamp_min.Tensor": _clamp(1, None),
    "aten.clamp_max.default": _clamp(None, 1),
    "aten.clamp_max.Tensor": _clamp(None, 1),
    "aten.where.self": _where,
    "aten.where.ScalarSelf": _where,
    "aten.where.ScalarOther": _where,
    "aten.where.Scalar": _where,
    "aten._to_copy.default": _cast,
    "aten.clone.default": _cast,
    "aten.lift_fresh_copy.default": _cast,
    "prims.convert_element_type.default": _cast,
    "aten.copy.default": _copy,
    CLASS_INDEX: _class_index,
}
