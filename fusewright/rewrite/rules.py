"""Algebra on graphs: each rule is one equation that holds bit for bit, or within rounding.

A rule takes one node and the graph so far, and returns a replacement or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fusewright.ir.graph import (
    Arg,
    Dim,
    Graph,
    Node,
    Ratio,
    Ref,
    TensorSpec,
    contiguous_strides,
)
from fusewright.ir.operators import SCALAR_OPS
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.joins import CAT, joined
from fusewright.rewrite.scans import reversed_scan
from fusewright.rewrite.views import CANONICAL_VIEWS, OPAQUE_VIEWS, SPLITS, permute_order


@dataclass(frozen=True)
class Context:
    """What a rule may read: the graph being built, and the readers of each old value."""

    builder: Builder
    users: Mapping[str, list[Node]]
    outputs: frozenset[str]
    produced: Mapping[str, Node]

    def producer(self, arg: Arg) -> Node | None:
        return self.produced.get(arg.name) if isinstance(arg, Ref) else None


Rewrite = Callable[[Context, Node], Ref | None]


def times_one(context: Context, node: Node) -> Ref | None:
    """x·1 = x and x/1 = x, signs and NaN included, unless a copy is needed."""
    if node.op not in ("mul", "div") or len(node.args) != 2:
        return None
    left, right = node.args
    if not isinstance(right, int | float) or right != 1 or not isinstance(left, Ref):
        return None
    same = context.builder.spec(left.name) == node.spec
    return left if same and not _needs_memory(context, node, left) else None


def same_cast(context: Context, node: Node) -> Ref | None:
    """cast(x) = x if x has that dtype and layout, unless a copy is needed."""
    if node.op != "cast" or not isinstance(node.args[0], Ref):
        return None
    source = node.args[0]
    same = context.builder.spec(source.name) == node.spec
    return source if same and not _needs_memory(context, node, source) else None


def _needs_memory(context: Context, node: Node, source: Ref) -> bool:
    """Whether a copy of `source` must stay a copy. It must if the model returns it or a view of it,
    because two outputs may not share memory. It must if the source is an argument, which the caller
    may overwrite before backward reads it. And it must if the source is expanded, so that it is not
    in memory as a whole."""
    while (producer := context.producer(source)) is not None and producer.op in _LOOKING:
        assert isinstance(producer.args[0], Ref)
        source = producer.args[0]
        if producer.op == "aten.expand.default":
            return True
    return producer is None or _is_given_out(node.name, context.users, context.outputs)


def _is_given_out(name: str, users: Mapping[str, list[Node]], outputs: frozenset[str]) -> bool:
    """Whether a value, or a view of it, is an output."""
    frontier = [name]
    while frontier:
        name = frontier.pop()
        if name in outputs:
            return True
        frontier += [user.name for user in users.get(name, []) if user.op in _LOOKING]
    return False


# Operators whose result shares memory with their operand.
_LOOKING = CANONICAL_VIEWS | OPAQUE_VIEWS | SPLITS | {"getitem"}


def view_of_view(context: Context, node: Node) -> Ref | None:
    """view(view(x)) = view(x)"""
    inner = context.producer(node.args[0]) if node.op == "aten.view.default" else None
    if inner is None or inner.op != "aten.view.default":
        return None
    assert node.spec is not None and isinstance(inner.args[0], Ref)
    return context.builder.view(node, inner.args[0], node.spec.shape, node.spec.strides)


def permute_of_permute(context: Context, node: Node) -> Ref | None:
    """permute(permute(x, p), q) = permute(x, p∘q), and the identity is x."""
    inner = context.producer(node.args[0]) if node.op == "aten.permute.default" else None
    if inner is None or inner.op != "aten.permute.default":
        return None
    first, second = permute_order(inner), permute_order(node)
    order = tuple(first[position] for position in second)
    source = inner.args[0]
    assert isinstance(source, Ref)
    if order == tuple(range(len(order))):
        return source
    return context.builder.add(replace(node, args=(source, order)))


def scan_from_the_end(context: Context, node: Node) -> Ref | None:
    """flip(scan(flip(x))) = scan(x), from the other end"""
    reversed_ = reversed_scan(node, context.producer)
    return context.builder.add(reversed_) if reversed_ is not None else None


def split_addmm(context: Context, node: Node) -> Ref | None:
    """addmm(b, x, w) = mm(x, w) + b, if a following loop can add the bias at no cost."""
    if node.op != "aten.addmm.default" or node.kwargs or node.spec is None:
        return None
    if node.spec.dtype not in ("float32", "float64") or not _feeds_loop(context, node):
        return None
    bias, left, right = node.args
    matmul = context.builder.add(
        Node(f"{node.name}_mm", "aten.mm.default", (left, right), (), node.spec, node.source)
    )
    return context.builder.point(node, "add", (matmul, bias), node.spec.dtype)


def split_convolution_bias(context: Context, node: Node) -> Ref | None:
    """convolution(x, w, b) = convolution(x, w) + b per channel, added by the loop that follows.

    PyTorch adds the bias in a kernel of its own, so this pays even for values saved for backward.
    """
    if node.op != "aten.convolution.default" or node.spec is None:
        return None
    bias = node.args[2]
    if not isinstance(bias, Ref) or node.spec.dtype not in ("float32", "float64"):
        return None
    if not _has_loop(context, node):
        return None
    args = (*node.args[:2], None, *node.args[3:])
    bare = context.builder.add(replace(node, name=f"{node.name}_bare", args=args))
    return context.builder.plus_channels(node, bare, bias)


def _feeds_loop(context: Context, node: Node) -> bool:
    """Whether our loops read the value, and it need not be in memory."""
    return node.name not in context.outputs and _has_loop(context, node)


def _has_loop(context: Context, node: Node) -> bool:
    """Whether one of our operators reads the value and computes with it."""
    return any(
        not user.is_aten and user.op != "getitem" for user in context.users.get(node.name, [])
    )


def join_for_loops(context: Context, node: Node) -> Ref | None:
    """cat(a, b) = a selection by index, if a loop reads it; cat(a) = a."""
    if node.op != CAT:
        return None
    match node.args[0]:
        case (Ref() as single,) if context.builder.spec(single.name) == node.spec:
            return None if _needs_memory(context, node, single) else single
    frontier = [node.name]
    while frontier:
        for user in context.users.get(frontier.pop(), []):
            if user.op in SCALAR_OPS or user.op.startswith("reduce_"):
                return joined(context.builder, node)
            if user.op in CANONICAL_VIEWS:
                frontier.append(user.name)
    return None


RULES: tuple[Rewrite, ...] = (
    times_one,
    same_cast,
    view_of_view,
    permute_of_permute,
    scan_from_the_end,
    join_for_loops,
    split_addmm,
    split_convolution_bias,
)


def simplify(graph: Graph) -> Graph:
    """Apply every rule once, in order, to each node, then merge equal nodes."""
    return merge_equal(split_bias_gradient(_apply(graph)))


def _apply(graph: Graph) -> Graph:
    builder = Builder(graph.inputs)
    users = graph.users()
    outputs = frozenset(name for name in graph.outputs if isinstance(name, str))
    produced: dict[str, Node] = {}
    context = Context(builder, users, outputs, produced)
    for node in graph.nodes:
        known = builder.resolved(node)
        before = len(builder.nodes)
        result: Ref | None = None
        for rule in RULES:
            result = rule(context, known)
            if result is not None:
                break
        result = result or builder.add(known)
        for made in builder.nodes[before:]:
            produced[made.name] = made
        builder.substitute(node.name, result)
    return builder.graph(graph.outputs)


def split_bias_gradient(graph: Graph) -> Graph:
    """convolution_backward's bias gradient = Σ dy over all but channels, a sum we can fuse."""
    builder = Builder(graph.inputs)
    summed: dict[str, Node] = {}
    for node in graph.nodes:
        known = builder.resolved(node)
        if _gives_bias_gradient(node):
            mask = known.args[-1]
            assert isinstance(mask, tuple)
            summed[node.name] = known
            known = replace(known, args=(*known.args[:-1], (mask[0], mask[1], False)))
        if node.op == "getitem" and node.args[1] == 2 and _name(node.args[0]) in summed:
            builder.substitute(node.name, _bias_sum(builder, node, summed[_name(node.args[0])]))
            continue
        builder.substitute(node.name, builder.add(known))
    return builder.graph(graph.outputs)


def _name(arg: Arg) -> str:
    return arg.name if isinstance(arg, Ref) else ""


def _gives_bias_gradient(node: Node) -> bool:
    if node.op != "aten.convolution_backward.default":
        return False
    mask = node.args[-1]
    return isinstance(mask, tuple) and bool(mask[2])


def _bias_sum(builder: Builder, node: Node, backward: Node) -> Ref:
    gradient = backward.args[0]
    assert isinstance(gradient, Ref)
    held = builder.spec(gradient.name)
    dims = tuple(position for position in range(len(held.shape)) if position != 1)
    shape = (held.shape[1],)
    spec = TensorSpec(held.dtype, shape, contiguous_strides(shape), held.device)
    return builder.add(Node(node.name, "reduce_sum", (gradient, dims), (), spec, node.source))


def merge_equal(graph: Graph) -> Graph:
    """Merge nodes with the same operator and operands, unless both are outputs."""
    builder = Builder(graph.inputs)
    seen: dict[tuple[object, ...], Ref] = {}
    users = graph.users()
    outputs = frozenset(name for name in graph.outputs if isinstance(name, str))
    for node in graph.nodes:
        known = builder.resolved(node)
        named = tuple((name, _typed(value)) for name, value in known.kwargs)
        key = (known.op, _typed(known.args), named, known.spec)
        separate = known.random or known.effect
        separate = separate or (known.op != "getitem" and _is_given_out(node.name, users, outputs))
        if key in seen and not separate:
            builder.substitute(node.name, seen[key])
            continue
        added = builder.add(known)
        seen.setdefault(key, added)
        builder.substitute(node.name, added)
    return builder.graph(graph.outputs)


def _typed(arg: Arg) -> object:
    """Arguments for comparison: 1, 1.0 and True are different, and so are 0.0 and -0.0."""
    if isinstance(arg, tuple):
        return tuple(_typed(item) for item in arg)
    if isinstance(arg, Ref | Dim | Ratio):
        return arg
    return (type(arg).__name__, repr(arg))
