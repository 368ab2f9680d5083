"""Transposed convolutions for which channels-last would only replace cuDNN's own copies by ours.

cuDNN transposes input and result for itself. If a loop computes the one or reads the other, it can
do that instead, and channels-last saves a pass. Without such loops our copies take as long as
cuDNN's (H200, 0.8 GB of results: 1.68 ms of kernels, 1.63 with cuDNN's copies).
"""

from __future__ import annotations

from fusewright.ir.graph import Graph, Node, Ref
from fusewright.ir.operators import SCALAR_OPS
from fusewright.rewrite.padding import PAD
from fusewright.rewrite.views import is_canonical_view

_CONVOLUTION = "aten.convolution.default"
_TRANSPOSED = 6  # the argument


def lone_convolutions(graph: Graph) -> frozenset[str]:
    """Those whose input no loop computes, and whose result no loop or convolution reads."""
    made, users = {node.name: node for node in graph.nodes}, graph.users()
    return frozenset(
        node.name
        for node in graph.nodes
        if node.op == _CONVOLUTION
        and node.args[_TRANSPOSED]
        and not _is_made_by_loop(made, node)
        and not any(_may_take(user) for user in users[node.name])
    )


def _is_made_by_loop(made: dict[str, Node], node: Node) -> bool:
    source = node.args[0]
    before = made.get(source.name) if isinstance(source, Ref) else None
    return before is not None and _may_take(before)


def _may_take(node: Node) -> bool:
    """Whether a node may share a layout with a convolution beside it."""
    computes = node.op in SCALAR_OPS or node.op.startswith(("reduce_", "scan_"))
    return computes or node.op in (PAD, _CONVOLUTION) or is_canonical_view(node)
