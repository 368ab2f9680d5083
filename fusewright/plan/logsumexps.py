"""log Σ e^x in one sweep or in two: as one reduction, or as a maximum and then a sum.

As one reduction it can end a product, and a loop reads its operand once. That takes a dozen
instructions an element more: a linear layer takes 1.2 times as long that ends in it as with a loop
that follows (H200), so that products do so on trial only. A loop that has rows at hand for a second
sweep is better off with the two; so are the host's, which wait for their arithmetic and not for
memory (one thread, 4096 × 1024 floats by columns: 22 instead of 15 ms). But a maximum in 16 bits
must not go through memory: what it is rounded by may be more than the exponent of any number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from fusewright.ir.graph import HALVES, ONE, Graph, Node, Ref, contiguous_strides
from fusewright.plan.finish import kernel_of
from fusewright.plan.fuse import Group
from fusewright.plan.rows import keeps_rows
from fusewright.plan.values import Values
from fusewright.rewrite.builder import Builder

LOGSUMEXP = "reduce_logsumexp"


def better_apart(values: Values, loops: Iterable[Group]) -> frozenset[str]:
    """The reductions of loops that had better take two sweeps."""
    return frozenset(
        name
        for group in loops
        for name in group.items
        if values.nodes[name].op == LOGSUMEXP and not _gains(values, name, group)
    )


def _gains(values: Values, name: str, group: Group) -> bool:
    """Whether one sweep spares a loop what would otherwise go through memory, to its advantage."""
    kernel = kernel_of(group.assembled, "trial", "", group.items, values)
    wanted = values.online or values.spec(name).dtype in HALVES
    return wanted and not keeps_rows(values, kernel)


def in_two_sweeps(graph: Graph, names: frozenset[str]) -> Graph:
    """log Σ e^x = most + log Σ e^(x - most) for these reductions, with 0 for a `most` that is
    infinite: the sum is then infinite or 0 itself."""
    builder = Builder(graph.inputs)
    for node in graph.nodes:
        known = builder.resolved(node)
        made = _taken_apart(builder, known) if node.name in names else builder.add(known)
        builder.substitute(node.name, made)
    return builder.graph(graph.outputs)


def _taken_apart(builder: Builder, node: Node) -> Ref:
    operand, dims = node.args
    assert isinstance(operand, Ref) and isinstance(dims, tuple) and node.spec is not None
    held = builder.spec(operand.name)
    dtype = held.dtype
    row, each = (replace(node, name=f"{node.name}_{part}") for part in ("most", "below"))
    most = builder.add(replace(row, op="reduce_max"))
    size = builder.point(row, "abs", (most,), dtype)
    infinite = builder.point(row, "eq", (size, math.inf), "bool")
    base = builder.point(row, "where", (infinite, 0.0, most), dtype)
    shape = tuple(ONE if at in dims else size for at, size in enumerate(held.shape))
    each = replace(each, spec=held)
    along = builder.view(each, base, shape, contiguous_strides(shape))
    below = builder.point(each, "sub", (operand, along), dtype)
    power = builder.point(each, "exp", (below,), dtype)
    total = builder.add(replace(node, name=f"{node.name}_sum", op="reduce_sum", args=(power, dims)))
    logarithm = builder.point(replace(row, name=f"{node.name}_log"), "log", (total,), dtype)
    return builder.point(node, "add", (logarithm, base), dtype)
