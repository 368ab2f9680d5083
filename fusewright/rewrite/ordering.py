"""One order for the nodes of a graph, so that equal graphs are written alike.

PyTorch calls, reductions and outputs keep their order, and with it the lifetimes of the tensors in
memory. Every other node comes just before the first of them that needs it, after its own operands.
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.graph import Graph, Node
from fusewright.ir.operators import SCALAR_OPS
from fusewright.rewrite.padding import PAD
from fusewright.rewrite.views import CANONICAL_VIEWS

_INLINED = frozenset({"full", "iota", PAD, *SCALAR_OPS, *CANONICAL_VIEWS})


def in_order(graph: Graph) -> Graph:
    """The same graph with its nodes in the fixed order."""
    nodes = {node.name: node for node in graph.nodes}
    outputs = {name for name in graph.outputs if isinstance(name, str)}
    done: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op not in _INLINED or node.name in outputs:
            _finish(node, nodes, done)
    return replace(graph, nodes=tuple(done.values()))


def _finish(node: Node, nodes: dict[str, Node], done: dict[str, Node]) -> None:
    """Append a node after everything that it needs; without recursion, for long chains."""
    waiting = [node]
    while waiting:
        last = waiting[-1]
        missing = [name for name in last.refs() if name in nodes and name not in done]
        if missing:
            waiting += [nodes[name] for name in reversed(missing)]
        else:
            waiting.pop()
            done.setdefault(last.name, last)
