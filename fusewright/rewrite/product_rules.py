"""Algebra on matmuls and convolutions that stay PyTorch's or become ours.

A bias is added by the loop that follows, if one does. Otherwise it is an operand of the matmul.
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.graph import (
    FLOATS,
    ONE,
    Arg,
    Node,
    Ref,
    TensorSpec,
    contiguous_strides,
    product,
)
from fusewright.rewrite.context import Context, feeds_loop, has_loop, is_given_out
from fusewright.rewrite.reductions import reduce
from fusewright.rewrite.view_rules import PERMUTE, VIEW, permute_of_permute
from fusewright.rewrite.views import CANONICAL_VIEWS, permute_order

MM, BMM = "aten.mm.default", "aten.bmm.default"
_BARE = {"aten.addmm.default": MM, "aten.baddbmm.default": BMM}
_WIDE = ("float32", "float64")


def split_addmm(context: Context, node: Node) -> Ref | None:
    """addmm(b, x, w) = mm(x, w) + b, if a following loop can add the bias at no cost."""
    assert node.spec is not None
    if node.kwargs or node.spec.dtype not in _WIDE or not feeds_loop(context, node):
        return None
    bias, left, right = node.args
    matmul = context.builder.add(
        Node(f"{node.name}_mm", MM, (left, right), (), node.spec, node.source)
    )
    return context.builder.point(node, "add", (matmul, bias), node.spec.dtype)


def split_scaled(context: Context, node: Node) -> Ref | None:
    """addmm(z, x, w, beta, alpha) = beta · z + alpha · mm(x, w), if z is more than a row. PyTorch
    copies such a z before it adds to it."""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    added, left, right = node.args
    beta, alpha = node.argument("beta", None, 1), node.argument("alpha", None, 1)
    row = _is_row(context, added, node.spec) and node.op == "aten.addmm.default"
    if node.spec.dtype not in _WIDE or (row and beta == alpha == 1):
        return None
    bare = Node(f"{node.name}_mm", _BARE[node.op], (left, right), (), node.spec, node.source)
    total, dtype = context.builder.add(bare), node.spec.dtype
    if alpha != 1:
        total = context.builder.point(node, "mul", (total, alpha), dtype)
    if beta == 0:  # then PyTorch does not read z, which may be NaN
        return total
    if beta != 1:
        held = replace(
            node, name=f"{node.name}_added", spec=context.builder.spec(node.args[0].name)
        )
        added = context.builder.point(held, "mul", (added, beta), dtype)
    return context.builder.point(node, "add", (total, added), dtype)


def _is_row(context: Context, value: Arg, spec: TensorSpec) -> bool:
    """Whether a value is one number for each column."""
    assert isinstance(value, Ref)
    shape = context.builder.spec(value.name).shape
    return shape in ((spec.shape[-1],), (ONE, spec.shape[-1]))


def join_addmm(context: Context, node: Node) -> Ref | None:
    """mm(x, w) + b = addmm(b, x, w), if no loop computes with the sum or it is stored anyway."""
    assert node.spec is not None
    value, bias = node.args
    spec = node.spec
    if spec.dtype not in FLOATS or not isinstance(bias, Ref):
        return None
    if spec.dtype in _WIDE and feeds_loop(context, node):
        return None
    matmul = _viewed_matmul(context, value)
    if matmul is None or matmul.spec is None or matmul.spec.shape[-1] != spec.shape[-1]:
        return None
    row = spec.shape[-1:]
    if context.builder.spec(bias.name).shape != row or not _is_read_once(context, node, value):
        return None
    dtypes = (matmul.spec.dtype, context.builder.spec(bias.name).dtype)
    if set(dtypes) != {spec.dtype} or spec.strides != contiguous_strides(spec.shape):
        return None
    made = replace(
        matmul, name=f"{node.name}_mm", op="aten.addmm.default", args=(bias, *matmul.args)
    )
    return context.builder.view(node, context.builder.add(made), spec.shape, spec.strides)


def _viewed_matmul(context: Context, value: Arg) -> Node | None:
    node = context.producer(value)
    while node is not None and node.op == "aten.view.default":
        node = context.producer(node.args[0])
    return node if node is not None and node.op == MM else None


def _is_read_once(context: Context, node: Node, value: Arg) -> bool:
    """Whether only this node reads an operand, or the matmul that the operand is a view of."""
    assert isinstance(value, Ref)
    names = context.builder.names
    for name in context.old[node.name].refs():
        if names.get(name, name) != value.name:
            continue
        while name in context.old and context.old[name].op in CANONICAL_VIEWS:
            name = context.old[name].refs()[0]
        given = is_given_out(name, context.users, context.outputs)
        return not given and len(context.readers(name)) == 1
    return False


def one_batch(context: Context, node: Node) -> Ref | None:
    """bmm(x, w) = mm(x, w) for a batch of one"""
    assert node.spec is not None
    if node.spec.shape[0] != ONE:
        return None
    matrices = tuple(_without_batch(context, node, arg) for arg in node.args)
    shape, strides = node.spec.shape[1:], node.spec.strides[1:]
    spec = replace(node.spec, shape=shape, strides=strides)
    matmul = Node(f"{node.name}_mm", MM, matrices, (), spec, node.source)
    return context.builder.view(
        node, context.builder.add(matmul), node.spec.shape, node.spec.strides
    )


def _without_batch(context: Context, node: Node, arg: Arg) -> Ref:
    assert isinstance(arg, Ref)
    held = context.builder.spec(arg.name)
    like = replace(node, name=f"{arg.name}_matrix")
    return context.viewed(like, arg, held.shape[1:], held.strides[1:])


def transposed_mm(context: Context, node: Node) -> Ref | None:
    """(x · w)ᵀ = wᵀ · xᵀ, unless the model returns it: then its layout stays."""
    assert node.spec is not None
    matmul, order = context.producer(node.args[0]), permute_order(node)
    swapped = (*range(len(order) - 2), len(order) - 1, len(order) - 2)
    if matmul is None or matmul.op not in (MM, BMM) or order != swapped:
        return None
    given = is_given_out(node.name, context.users, context.outputs)
    if (given and not context.is_backward) or not context.is_only_reader(node):
        return None
    users = context.users[node.name]
    if users and all(_undoes(context, user, node.name) for user in users):
        return None
    if not _is_followed(context, node):
        return None
    left, right = matmul.args
    args = tuple(_transposed(context, node, each, swapped) for each in (right, left))
    spec = replace(node.spec, strides=contiguous_strides(node.spec.shape))
    return context.builder.add(replace(matmul, name=f"{node.name}_mm", args=args, spec=spec))


def _is_followed(context: Context, node: Node) -> bool:
    """Whether the sizes of all views of a value follow from its own, so that its layout may change.

    Of sizes with names of their own it is not known: a kernel then reads the view's memory.
    """
    for user in context.users.get(node.name, []):
        if user.op not in CANONICAL_VIEWS or user.spec is None or node.spec is None:
            continue
        reshaped = user.op == VIEW and product(user.spec.shape) != product(node.spec.shape)
        if reshaped or not _is_followed(context, user):
            return False
    return True


def _undoes(context: Context, node: Node, name: str) -> bool:
    """Whether a node puts the dimensions of a transposed value back in order."""
    if node.op != PERMUTE or node.spec is None:
        return False
    first, second = permute_order(context.old[name]), permute_order(node)
    order = [first[at] for at, size in zip(second, node.spec.shape, strict=True) if size != ONE]
    return order == sorted(order)


def _transposed(context: Context, like: Node, arg: Arg, order: tuple[int, ...]) -> Ref:
    assert isinstance(arg, Ref)
    held = context.builder.spec(arg.name)
    shape, strides = (tuple(each[at] for at in order) for each in (held.shape, held.strides))
    spec = replace(held, shape=shape, strides=strides)
    view = Node(f"{arg.name}_t", PERMUTE, (arg, order), (), spec, like.source)
    return permute_of_permute(context, view) or context.builder.add(view)


def outer_product(context: Context, node: Node) -> Ref | None:
    """mm(x, w) = x · w if they share a dimension of size one"""
    assert node.spec is not None and isinstance(node.args[0], Ref)
    if context.builder.spec(node.args[0].name).shape[-1] != ONE or node.spec.dtype not in FLOATS:
        return None
    kept = [at for at in range(len(node.spec.shape)) if at < len(node.spec.shape) - 2]
    kept += [at for at in (-2, -1) if node.spec.shape[at] != ONE]
    shape = tuple(node.spec.shape[at] for at in kept)
    factors = tuple(_with_dims(context, node, arg, kept) for arg in node.args)
    flat = replace(node, spec=replace(node.spec, shape=shape, strides=contiguous_strides(shape)))
    product = context.builder.point(flat, "mul", factors, node.spec.dtype)
    return context.builder.view(node, product, node.spec.shape, node.spec.strides)


def _with_dims(context: Context, node: Node, arg: Arg, kept: list[int]) -> Ref:
    """A factor with these of its dimensions; the others have size one."""
    assert isinstance(arg, Ref)
    held = context.builder.spec(arg.name).shape
    shape = tuple(held[at] for at in kept)
    like = replace(node, name=f"{arg.name}_factor")
    return context.viewed(like, arg, shape, contiguous_strides(shape))


def dot_products(context: Context, node: Node) -> Ref | None:
    """bmm(x, w) = Σ x · w if each matrix is one row, times one column"""
    assert node.spec is not None
    if node.spec.shape[-2:] != (ONE, ONE) or node.spec.dtype not in _WIDE:
        return None
    batches = node.spec.shape[:-2]
    rows = tuple(_as_row(context, node, arg) for arg in node.args)
    terms = replace(node, name=f"{node.name}_terms", spec=context.builder.spec(rows[0].name))
    products = context.builder.point(terms, "mul", rows, node.spec.dtype)
    total = reduce(context.builder, node, "sum", products, (len(batches),))
    return context.builder.view(node, total, node.spec.shape, node.spec.strides)


def _as_row(context: Context, node: Node, arg: Arg) -> Ref:
    assert isinstance(arg, Ref)
    *batches, first, second = context.builder.spec(arg.name).shape
    shape = (*batches, first * second)
    like = replace(node, name=f"{arg.name}_row")
    return context.viewed(like, arg, shape, contiguous_strides(shape))


def split_convolution_bias(context: Context, node: Node) -> Ref | None:
    """convolution(x, w, b) = convolution(x, w) + b per channel, added by the loop that follows.

    PyTorch adds the bias in a kernel of its own, so this pays even for values saved for backward.
    """
    assert node.spec is not None
    bias = node.args[2]
    if not isinstance(bias, Ref) or node.spec.dtype not in _WIDE or not has_loop(context, node):
        return None
    args = (*node.args[:2], None, *node.args[3:])
    bare = context.builder.add(replace(node, name=f"{node.name}_bare", args=args))
    return context.builder.plus_channels(node, bare, bias)
