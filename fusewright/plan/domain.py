"""The iteration space of a kernel: the axes of a reduction or of a pointwise value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusewright.ir.graph import Dim, Node, Ref, product
from fusewright.plan.values import Values


@dataclass(frozen=True)
class Domain:
    """Row-major axes of an iteration space; `reduced` marks the axes of reductions and scans."""

    sizes: tuple[Dim, ...]
    reduced: tuple[bool, ...]

    def split(self, position: int, inner: Dim) -> Domain:
        outer = self.sizes[position].divided_by(inner)
        assert outer is not None
        flag = self.reduced[position]
        return Domain(
            (*self.sizes[:position], outer, inner, *self.sizes[position + 1 :]),
            (*self.reduced[:position], flag, flag, *self.reduced[position + 1 :]),
        )

    @cached_property
    def kept_axes(self) -> tuple[int, ...]:
        return tuple(i for i, reduced in enumerate(self.reduced) if not reduced)

    @cached_property
    def reduced_axes(self) -> tuple[int, ...]:
        return tuple(i for i, reduced in enumerate(self.reduced) if reduced)

    @cached_property
    def numel(self) -> Dim:
        return product(self.sizes)


def reduction_domain(values: Values, node: Node) -> Domain:
    """The iteration space of one reduction: its operand's shape."""
    assert isinstance(node.args[0], Ref) and isinstance(node.args[1], tuple)
    shape = values.spec(node.args[0].name).shape
    reduced = tuple(position in node.args[1] for position in range(len(shape)))
    return _without_ones(shape, reduced)


def scan_domain(values: Values, node: Node) -> Domain:
    """The iteration space of a scan; its axis is marked."""
    shape = values.spec(node.name).shape
    return _without_ones(shape, tuple(position == node.args[1] for position in range(len(shape))))


def _without_ones(shape: tuple[Dim, ...], reduced: tuple[bool, ...]) -> Domain:
    kept = [(s, r) for s, r in zip(shape, reduced, strict=True) if s != Dim(1)]
    return Domain(tuple(s for s, _ in kept), tuple(r for _, r in kept))


def point_domain(shape: tuple[Dim, ...]) -> Domain:
    return _without_ones(shape, (False,) * len(shape))
