"""Running sums and products: `scan_KIND(x, dim, backward)`, along one dimension, from its start or,
if the model flips before and after, from its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fusewright.ir.graph import ONE, Arg, Node, Ref
from fusewright.rewrite.builder import Builder


def _scan(kind: str) -> Callable[[Builder, Node], Ref | None]:
    def lower(builder: Builder, node: Node) -> Ref | None:
        assert node.spec is not None and isinstance(node.args[0], Ref)
        if node.spec.dtype == "bool":  # eager mode may refuse it
            return None
        value = builder.cast(node, node.args[0], node.spec.dtype)
        rank = len(node.spec.shape)
        dim = node.argument("dim", 1, 0)
        assert isinstance(dim, int)
        along = dim % max(rank, 1)
        if not rank or node.spec.shape[along] == ONE:
            return builder.point(node, "cast", (value,), node.spec.dtype)
        args = (value, along, False)
        return builder.add(Node(node.name, f"scan_{kind}", args, (), node.spec, node.source))

    return lower


SCANS: Mapping[str, Callable[[Builder, Node], Ref | None]] = {
    "aten.cumsum.default": _scan("sum"),
    "aten.cumprod.default": _scan("prod"),
}


def reversed_scan(node: Node, producer: Callable[[Arg], Node | None]) -> Node | None:
    """flip(scan(flip(x))) = scan(x) from the other end: the form of cumsum's gradient."""
    dims = _flipped(node)
    made = producer(node.args[0]) if dims else None
    if made is None or not made.op.startswith("scan_") or dims != (made.args[1],):
        return None
    source = producer(made.args[0])
    if source is None or _flipped(source) != dims or source.spec is None:
        return None
    if made.spec is None or source.spec.dtype != made.spec.dtype:
        return None
    args = (source.args[0], made.args[1], not made.args[2])
    return replace(made, name=node.name, args=args, spec=node.spec)


def _flipped(node: Node) -> tuple[int, ...]:
    if node.op != "aten.flip.default" or node.spec is None or not isinstance(node.args[1], tuple):
        return ()
    rank = max(len(node.spec.shape), 1)
    return tuple(dim % rank for dim in node.args[1] if isinstance(dim, int))
