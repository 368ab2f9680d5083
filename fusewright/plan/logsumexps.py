"""log Σ e^x in one sweep or in two: as one reduction, or as a maximum and then a sum.

As one reduction it can be an epilogue, and a loop reads its operand once. But it takes a dozen more
instructions per element: a linear layer with this epilogue takes 1.2 times as long as one with a
loop after it (H200), so epilogues use it on trial only. A loop that holds its rows for a second
sweep is faster with two reductions. So is the host, where arithmetic is the limit and not memory
(one thread, 4096 × 1024 floats by columns: 22 instead of 15 ms). But a 16-bit maximum must not go
through memory: its rounding error may exceed the range of the exponential.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from fusewright.ir.graph import HALF_DTYPES, ONE, Graph, Node, Ref, contiguous_strides
from fusewright.plan.merge import Group
from fusewright.plan.rows import keeps_rows
from fusewright.plan.values import Values
from fusewright.rewrite.builder import Builder

LOGSUMEXP = "reduce_logsumexp"


def better_in_two_sweeps(values: Values, loops: Iterable[Group]) -> frozenset[str]:
    """The reductions of loops that are faster in two sweeps."""
    return frozenset(
        name
        for group in loops
        for name in group.items
        if values.nodes[name].op == LOGSUMEXP and not _gains(values, name, group)
    )


def _gains(values: Values, name: str, group: Group) -> bool:
    """Whether one sweep saves a loop memory traffic, to its advantage."""
    wanted = values.target.online or values.spec(name).dtype in HALF_DTYPES
    return wanted and not keeps_rows(values, group.kernel)


def in_two_sweeps(graph: Graph, names: frozenset[str]) -> Graph:
    """log Σ e^x = most + log Σ e^(x - most) for these reductions. An infinite `most` is replaced by
    0: the sum is then infinite or 0 itself."""
    builder = Builder(graph.inputs)
    for node in graph.nodes:
        known = builder.resolved(node)
        made = _in_two(builder, known) if node.name in names else builder.add(known)
        builder.substitute(node.name, made)
    return builder.graph(graph.outputs)


def _in_two(builder: Builder, node: Node) -> Ref:
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
