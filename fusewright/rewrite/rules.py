"""Algebra on graphs: each rule is one equation that holds bit for bit, or within rounding.

A rule takes one node and the graph so far. It returns a replacement, which other rules may rewrite
again, or a value that is in the graph already, or None. `RULES` names the operators of each rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

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
from fusewright.rewrite import product_rules as products
from fusewright.rewrite import scalar_rules as scalars
from fusewright.rewrite import view_rules as views
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.context import Context, Rewrite, is_given_out
from fusewright.rewrite.joins import CAT, ROLL
from fusewright.rewrite.normal_form import normal
from fusewright.rewrite.padding import PAD

MOST_TURNS = 8  # how often a replacement is replaced again


@dataclass(frozen=True)
class Rule:
    """An equation, and the operators that its left side begins with."""

    ops: tuple[str, ...]
    rewrite: Rewrite


_PERMUTE, _VIEW = "aten.permute.default", "aten.view.default"
_CONVOLUTION, _FLIP = "aten.convolution.default", "aten.flip.default"
_CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
_ADDMM, _BADDBMM = "aten.addmm.default", "aten.baddbmm.default"
_EXPAND, _SLICE = "aten.expand.default", "aten.slice.Tensor"
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")

RULES: tuple[Rule, ...] = (
    Rule(("mul", "div", "sub"), scalars.times_one),
    Rule(("cast",), scalars.same_cast),
    Rule(("cast",), scalars.cast_index),
    Rule(("mul",), scalars.times_minus_one),
    Rule(("neg",), scalars.minus_minus),
    Rule(("add", "sub"), scalars.plus_negative),
    Rule(("div",), scalars.one_over),
    Rule(("div",), scalars.over_power_of_two),
    Rule(("add",), scalars.twice),
    Rule(("pow",), scalars.small_power),
    Rule(("maximum",), scalars.above_zero),
    Rule(("reciprocal",), scalars.sigmoid_by_hand),
    Rule(("div",), scalars.swish_by_hand),
    Rule(("where",), scalars.known_choice),
    Rule(("where", "cast", "eq", "ne"), scalars.flag_by_choice),
    Rule(("where",), scalars.number_last),
    Rule(("logical_and", "logical_or"), scalars.and_true),
    Rule(("logical_not",), scalars.not_compared),
    Rule(_COMPARISONS, scalars.compared_difference),
    Rule((_VIEW, _PERMUTE, _EXPAND, _SLICE), views.view_of_constant),
    Rule((_VIEW,), views.view_of_view),
    Rule((_PERMUTE,), views.permute_of_permute),
    Rule((_PERMUTE,), views.permute_of_ones),
    Rule((PAD,), views.padded_constant),
    Rule(("reduce_sum", "reduce_max", "reduce_min"), views.reduce_of_reduce),
    Rule((_FLIP,), views.scan_from_the_end),
    Rule((CAT,), views.join_constants),
    Rule((CAT,), views.join_for_loops),
    Rule((ROLL,), views.roll_for_loops),
    Rule((_ADDMM,), products.split_addmm),
    Rule((_ADDMM, _BADDBMM), products.split_scaled),
    Rule(("add",), products.join_addmm),
    Rule((_PERMUTE,), products.transposed_mm),
    Rule((products.MM, products.BMM), products.outer_product),
    Rule((products.BMM,), products.dot_products),
    Rule((products.BMM,), products.one_batch),
    Rule((_CONVOLUTION,), products.split_convolution_bias),
)


@cache
def _rules_for(op: str) -> tuple[Rewrite, ...]:
    return tuple(rule.rewrite for rule in RULES if op in rule.ops)


def simplify(graph: Graph, *, is_backward: bool = False) -> Graph:
    """Apply the rules to each node in order, then merge equal nodes."""
    return merge_equal(split_bias_gradient(_apply(graph, is_backward)))


def _apply(graph: Graph, is_backward: bool) -> Graph:
    context = Context.of(graph, _rewritten, is_backward)
    for node in graph.nodes:
        context.substitute(node, _rewritten(context, context.builder.resolved(node)))
    return context.builder.graph(graph.outputs)


def _rewritten(context: Context, node: Node) -> Ref:
    """What stands for a node after all rules that fit it."""
    for _ in range(MOST_TURNS):
        if node.op in SCALAR_OPS and node.spec is not None:
            node = normal(node, context.builder.known)
        found = (rule(context, node) for rule in _rules_for(node.op))
        result = next((each for each in found if each is not None), None)
        if result is None:
            break
        if isinstance(result, Ref):
            return result
        node = result
    return context.builder.put(node)


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
        if node.op == _CONVOLUTION_BACKWARD:  # without a bias gradient its size has no meaning
            known = replace(known, args=(*known.args[:3], (0,), *known.args[4:]))
        if node.op == "getitem" and node.args[1] == 2 and _name(node.args[0]) in summed:
            builder.substitute(node.name, _bias_sum(builder, node, summed[_name(node.args[0])]))
            continue
        builder.substitute(node.name, builder.add(known))
    return builder.graph(graph.outputs)


def _name(arg: Arg) -> str:
    return arg.name if isinstance(arg, Ref) else ""


def _gives_bias_gradient(node: Node) -> bool:
    if node.op != _CONVOLUTION_BACKWARD:
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
        separate = separate or (known.op != "getitem" and is_given_out(node.name, users, outputs))
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
