"""aten.cat before a loop: a selection by index.

    cat(a, b)[.., i, ..] = a[.., i, ..] where i < size of a, else b[.., i - size of a, ..]

A loop reads each element from the tensor that has it, so no copy is needed. If nothing computes
with the result, PyTorch's copy is as good. Along the last dimension it is better, because each lane
would select for itself.
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.graph import LOOP_DTYPES, Node, Ref
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.padding import padded

CAT = "aten.cat.default"
MOST = 8  # tensors: each is a selection for every element


def joined(builder: Builder, node: Node) -> Ref | None:
    """The selection, if sizes along the dimension are fixed."""
    assert node.spec is not None
    given, along = node.args[0], node.argument("dim", 1, 0)
    if not isinstance(given, tuple) or not isinstance(along, int):
        return None
    spec, rank = node.spec, len(node.spec.shape)
    at = along % rank if rank else 0
    parts = [each for each in given if isinstance(each, Ref)]
    held = [builder.spec(each.name) for each in parts]
    same = all(each.device == spec.device and len(each.shape) == rank for each in held)
    known = all(each.dtype in LOOP_DTYPES for each in (spec, *held))
    if not (same and known) or at >= rank - 1 or not 2 <= len(parts) <= MOST:
        return None
    if not all(each.shape[at].is_static for each in (spec, *held)):
        return None
    total = spec.shape[at].factor
    index = builder.index_along(node, (0, 1), at - rank)
    asked = replace(node, name=f"{node.name}_before", spec=None)
    found: Ref | None = None
    last = total
    for part, each in zip(reversed(parts), reversed(held), strict=True):
        first = last - each.shape[at].factor
        if first == last:
            continue
        pairs = tuple((first, total - last) if d == at else (0, 0) for d in range(rank))
        value = padded(builder, node, builder.cast(node, part, spec.dtype), pairs, 0)
        if value is None:
            return None
        if found is None:
            found = value
        else:
            before = builder.point(asked, "lt", (index, last), "bool")
            found = builder.point(node, "where", (before, value, found), spec.dtype)
        last = first
    if found in parts:  # all others are empty; a result needs memory of its own
        return builder.point(node, "cast", (found,), spec.dtype)
    return found
