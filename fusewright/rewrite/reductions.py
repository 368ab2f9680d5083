"""ATen's reductions in terms of the loop language's.

A canonical reduction `reduce_KIND(x, dims)` drops the reduced dimensions; keepdim is a view after
it. A variance is one `reduce_welford`, whose results are the mean and m2 = Σ(x − mean)².
"""

from __future__ import annotations

from collections.abc import Callable

from fusewright.ir.graph import (
    ONE,
    Arg,
    Dim,
    Node,
    Ratio,
    Ref,
    TensorSpec,
    contiguous_strides,
    product,
)
from fusewright.rewrite.builder import Builder


def _dims(value: Arg, rank: int) -> tuple[int, ...]:
    """Reduced dimensions, counted from the front; None and () mean all."""
    if value is None or value == ():
        return tuple(range(rank))
    items = value if isinstance(value, tuple) else (value,)
    positions = [item % max(rank, 1) for item in items if isinstance(item, int)]
    return tuple(sorted(set(positions))) if rank else ()


def _reduced(shape: tuple[Dim, ...], dims: tuple[int, ...]) -> tuple[Dim, ...]:
    return tuple(size for position, size in enumerate(shape) if position not in dims)


def reduce(builder: Builder, node: Node, kind: str, value: Ref, dims: tuple[int, ...]) -> Ref:
    """reduce_KIND over `dims`, without keepdim; over dimensions of size one it is a copy."""
    value, dims = _drop_ones(builder, node, value, dims)
    if not dims:
        return _copied(builder, node, value)
    held = builder.spec(value.name)
    shape = _reduced(held.shape, dims)
    spec = TensorSpec(held.dtype, shape, contiguous_strides(shape), held.device)
    return builder.add(Node(node.name, f"reduce_{kind}", (value, dims), (), spec, node.source))


def _copied(builder: Builder, node: Node, value: Ref) -> Ref:
    """A copy: a result needs memory of its own although it equals its operand."""
    return builder.point(node, "cast", (value,), builder.spec(value.name).dtype)


def _drop_ones(
    builder: Builder, node: Node, value: Ref, dims: tuple[int, ...]
) -> tuple[Ref, tuple[int, ...]]:
    shape = builder.spec(value.name).shape
    ones = [position for position in dims if shape[position] == ONE]
    if not ones:
        return value, dims
    kept = [position for position in range(len(shape)) if position not in ones]
    smaller = tuple(shape[position] for position in kept)
    value = builder.view(node, value, smaller, contiguous_strides(smaller))
    return value, tuple(kept.index(position) for position in dims if position not in ones)


def count(shape: tuple[Dim, ...], dims: tuple[int, ...]) -> Dim:
    return product(tuple(shape[position] for position in dims))


def number(size: Dim) -> int | Ratio:
    return size.factor if size.is_static else Ratio(f"(1.0*{size})")


def _finish(builder: Builder, node: Node, value: Ref, spec: TensorSpec) -> Ref:
    return builder.view(node, value, spec.shape, spec.strides)


def _plain(kind: str, dims_at: int | None) -> Callable[[Builder, Node], Ref]:
    def lower(builder: Builder, node: Node) -> Ref:
        assert node.spec is not None and isinstance(node.args[0], Ref)
        value = node.args[0]
        if kind in ("any", "all"):  # of uint8, they are uint8, too, but 0 or 1
            value = builder.cast(node, value, "bool")
        value = builder.cast(node, value, node.spec.dtype)
        rank = len(builder.spec(value.name).shape)
        given = node.argument("dim", dims_at, None) if dims_at else None
        # For an empty list, any and all reduce nothing; the others reduce all dimensions.
        dims = () if given == () and kind in ("any", "all") else _dims(given, rank)
        return _finish(builder, node, reduce(builder, node, kind, value, dims), node.spec)

    return lower


def _mean(builder: Builder, node: Node) -> Ref:
    """mean = sum / count"""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    value = builder.cast(node, node.args[0], node.spec.dtype)
    shape = builder.spec(value.name).shape
    dims = _dims(node.argument("dim", 1, None), len(shape))
    if node.op == "aten.mean.default":
        dims = tuple(range(len(shape)))
    total = reduce(builder, node, "sum", value, dims)
    mean = builder.point(node, "div", (total, number(count(shape, dims))), node.spec.dtype)
    return _finish(builder, node, mean, node.spec)


def lower_variance(
    builder: Builder, node: Node, spec: TensorSpec, *, root: bool
) -> tuple[Ref, Ref]:
    """(var or std, mean), each with the shape of `spec`: var = m2 / max(count − correction, 0)"""
    assert isinstance(node.args[0], Ref)
    held = builder.spec(node.args[0].name)
    dims = _dims(node.argument("dim", 1, None), len(held.shape))
    correction = dict(node.kwargs).get("correction", None)
    correction = 1 if correction is None else correction
    assert isinstance(correction, int | float)
    size = count(held.shape, dims)
    shape = _reduced(held.shape, dims)
    flat = TensorSpec(held.dtype, shape, contiguous_strides(shape), held.device)
    mean, m2 = _welford(builder, node, dims, flat)
    like = Node(node.name, node.op, node.args, node.kwargs, flat, node.source)
    divisor: Arg
    if size.is_static:
        divisor = max(size.factor - correction, 0)
    elif correction == 0:
        divisor = number(size)
    else:
        rest = Ratio(f"(1.0*{size} - {correction!r})")
        spec_of_one = TensorSpec(held.dtype, (), (), held.device)
        full = builder.add(Node(node.name, "full", (rest,), (), spec_of_one, node.source))
        divisor = builder.point(like, "maximum", (full, 0.0), held.dtype)
    value = builder.point(like, "div", (m2, divisor), held.dtype)
    if root:
        value = builder.point(like, "sqrt", (value,), held.dtype)
    return (
        builder.view(like, value, spec.shape, spec.strides),
        builder.view(like, mean, spec.shape, spec.strides),
    )


def _welford(
    builder: Builder, node: Node, dims: tuple[int, ...], flat: TensorSpec
) -> tuple[Ref, Ref]:
    """(mean, m2) with the shape of `flat`; over size-one dimensions they are x and x − x."""
    assert isinstance(node.args[0], Ref)
    value, dims = _drop_ones(builder, node, node.args[0], dims)
    if not dims:
        like = Node(node.name, node.op, (), (), flat, node.source)
        m2 = builder.point(like, "sub", (value, value), flat.dtype)
        return _copied(builder, like, value), m2
    both = builder.add(
        Node(f"{node.name}_welford", "reduce_welford", (value, dims), (), None, node.source)
    )
    mean = builder.add(Node(f"{node.name}_mean", "getitem", (both, 0), (), flat, node.source))
    m2 = builder.add(Node(f"{node.name}_m2", "getitem", (both, 1), (), flat, node.source))
    return mean, m2


def _variance(root: bool) -> Callable[[Builder, Node], Ref]:
    def lower(builder: Builder, node: Node) -> Ref:
        assert node.spec is not None
        return lower_variance(builder, node, node.spec, root=root)[0]

    return lower


REDUCTIONS: dict[str, Callable[[Builder, Node], Ref]] = {
    "aten.sum.default": _plain("sum", None),
    "aten.sum.dim_IntList": _plain("sum", 1),
    "aten.prod.default": _plain("prod", None),
    "aten.prod.dim_int": _plain("prod", 1),
    "aten.amax.default": _plain("max", 1),
    "aten.amin.default": _plain("min", 1),
    "aten.max.default": _plain("max", None),
    "aten.min.default": _plain("min", None),
    "aten.any.default": _plain("any", None),
    "aten.any.dim": _plain("any", 1),
    "aten.any.dims": _plain("any", 1),
    "aten.all.default": _plain("all", None),
    "aten.all.dim": _plain("all", 1),
    "aten.all.dims": _plain("all", 1),
    "aten.logsumexp.default": _plain("logsumexp", 1),
    "aten.mean.default": _mean,
    "aten.mean.dim": _mean,
    "aten.var.correction": _variance(root=False),
    "aten.std.correction": _variance(root=True),
}
# Operators with two results; the second is the mean.
PAIRED_VARIANCES = {"aten.var_mean.correction": False, "aten.std_mean.correction": True}
