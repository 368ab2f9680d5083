"""Algebra on graphs: each rule is one equation that holds bit for bit, or within rounding.

A rule looks at one node (with the graph so far) and gives its replacement, or None.
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
from fusewright.rewrite.scans import turned_scan
from fusewright.rewrite.views import CANONICAL_VIEWS, OPAQUE_VIEWS, SPLITS, permute_order


@dataclass(frozen=True)
class Context:
    """What a rule may look at: the graph being built, and who reads each old value."""

    builder: Builder
    users: Mapping[str, list[Node]]
    outputs: frozenset[str]
    produced: Mapping[str, Node]

    def producer(self, arg: Arg) -> Node | None:
        return self.produced.get(arg.name) if isinstance(arg, Ref) else None


Rewrite = Callable[[Context, Node], Ref | None]


def times_one(context: Context, node: Node) -> Ref | None:
    """x·1 = x and x/1 = x, signs and NaN included, where nobody needs a copy."""
    if node.op not in ("mul", "div") or len(node.args) != 2:
        return None
    left, right = node.args
    if not isinstance(right, int | float) or right != 1 or not isinstance(left, Ref):
        return None
    same = context.builder.spec(left.name) == node.spec
    return left if same and not _needs_memory(context, node, left) else None


def same_cast(context: Context, node: Node) -> Ref | None:
    """cast(x) = x where the type and layout are x's already and nobody needs a copy."""
    if node.op != "cast" or not isinstance(node.args[0], Ref):
        return None
    source = node.args[0]
    same = context.builder.spec(source.name) == node.spec
    return source if same and not _needs_memory(context, node, source) else None


def _needs_memory(context: Context, node: Node, source: Ref) -> bool:
    """Whether a copy of `source` must stay one: the model gives it out, or a view of it, and may
    not give out one piece of memory twice; or the source is an argument, which its owner may
    write to before backward reads it; or it is a view of what is expanded, which lies nowhere."""
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


# Operators whose result lies in their operand's memory.
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
    """flip(scan(flip(x))) = scan(x), backward"""
    turned = turned_scan(node, context.producer)
    return context.builder.add(turned) if turned is not None else None


def split_addmm(context: Context, node: Node) -> Ref | None:
    """addmm(b, x, w) = mm(x, w) + b, where a loop that follows can add the bias for free."""
    if node.op != "aten.addmm.default" or node.kwargs or node.spec is None:
        return None
    if node.spec.dtype not in ("float32", "float64") or not _feeds_loop(context, node):
        return None
    bias, left, right = node.args
    product = context.builder.add(
        Node(f"{node.name}_mm", "aten.mm.default", (left, right), (), node.spec, node.source)
    )
    return context.builder.point(node, "add", (product, bias), node.spec.dtype)


def split_convolution_bias(context: Context, node: Node) -> Ref | None:
    """convolution(x, w, b) = convolution(x, w) + b per channel, added by the loop that follows.

    PyTorch adds it in a pass of its own, so this pays for a value that is saved for backward too.
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
    """Whether the value is needed for loops of ours, and not in memory."""
    return node.name not in context.outputs and _has_loop(context, node)


def _has_loop(context: Context, node: Node) -> bool:
    """Whether some reader of the value is an operator of ours that computes."""
    return any(
        not user.is_aten and user.op != "getitem" for user in context.users.get(node.name, [])
    )


def join_for_loops(context: Context, node: Node) -> Ref | None:
    """cat(a, b) = a choice by the index, where what reads it is a loop; cat(a) = a."""
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
    """convolution_backward's bias gradient = Σ dy over all but channels: a sum we can fuse."""
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
    """Two nodes with the same operator and operands are one, unless both are given out."""
    builder = Builder(graph.inputs)
    seen: dict[tuple[object, ...], Ref] = {}
    users = graph.users()
    outputs = frozenset(name for name in graph.outputs if isinstance(name, str))
    for node in graph.nodes:
        known = builder.resolved(node)
        named = tuple((name, _typed(value)) for name, value in known.kwargs)
        key = (known.op, _typed(known.args), named, known.spec)
        apart = known.random or known.effect
        apart = apart or (known.op != "getitem" and _is_given_out(node.name, users, outputs))
        if key in seen and not apart:
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
