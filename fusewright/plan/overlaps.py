"""Values that overlapping pooling windows would compute again and again, and are better stored.

Overlapping windows read each element of their operand several times. Recomputing a few operators
each time takes less than writing and reading their result: an H200 executes about 50 instructions
in the time in which it moves 8 bytes.
"""

from __future__ import annotations

from fusewright.ir.graph import Node
from fusewright.ir.operators import SCALAR_OPS
from fusewright.plan.values import Values, is_pointwise, is_view
from fusewright.rewrite.padding import PAD

MOST_REPEATED = 40  # operations per element, beyond computing it once
LOAD_COST = 4  # of a load from the cache, with its address


def read_often(values: Values) -> frozenset[str]:
    """Pointwise values to store, in addition to those that are realised."""
    found: set[str] = set()
    times: dict[str, float] = {}
    for node in reversed(values.graph.nodes):
        if node.spec is None:
            continue
        times[node.name] = _times(values, node, times)
        # Store the operand of padding, not its result: guards cost almost nothing.
        made = is_pointwise(node) and node.refs() and node.op != PAD
        again = times[node.name] - 1 if made else 0
        stored = node.name in values.realised
        if not stored and again > 0 and again * _cost(values, node) > MOST_REPEATED:
            found.add(node.name)
            stored = True
        times[node.name] = 1.0 if stored else times[node.name]
    return frozenset(found)


def _times(values: Values, node: Node, times: dict[str, float]) -> float:
    """How often each element is computed if every reader computes it for itself. Readers at the
    same index share it; slices, such as the taps of a window, do not."""
    size = values.spec(node.name).numel.at(values.sizes)
    together, apart = 1.0, 0.0
    for user in values.users[node.name]:
        if user.name not in times or size == 0:
            continue
        inlined = is_pointwise(user) or (is_view(user) and user.name not in values.memory_views)
        if not inlined:
            continue
        count = times[user.name] * values.spec(user.name).numel.at(values.sizes) / size
        if user.op == "aten.slice.Tensor":
            apart += count
        else:
            together = max(together, min(count, times[user.name]))
    return max(together, apart)


def _cost(values: Values, node: Node) -> float:
    """Operations for one element: all operators between memory and it."""
    seen, frontier, loads, total = {node.name}, [node], 0, 0
    while frontier:
        each = frontier.pop()
        total += SCALAR_OPS[each.op].cost if each.op in SCALAR_OPS else 0
        for name in each.refs():
            if name in seen:
                continue
            seen.add(name)
            above = values.nodes.get(name)
            followed = above is not None and is_view(above) and name not in values.memory_views
            applied = above is not None and is_pointwise(above) and name not in values.realised
            if above is not None and (followed or applied):
                frontier.append(above)
            else:
                loads += 1
    return total + LOAD_COST * max(0, loads - 1)
