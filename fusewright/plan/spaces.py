"""The index arithmetic of one iteration space, with its answers kept.

Fusion tries hundreds of groups over the same space, and most of them read the same values at the
same indices.
"""

from __future__ import annotations

from collections.abc import Callable

from fusewright.ir.graph import Dim, Node, Ref, TensorSpec
from fusewright.ir.loop import Access
from fusewright.plan.frames import (
    ElementIndex,
    NotFusibleError,
    access,
    group,
    through_broadcast,
    through_pad,
    through_view,
)
from fusewright.rewrite.padding import PAD
from fusewright.rewrite.views import is_canonical_view

# A value at an index.
IndexedValue = tuple[str, ElementIndex]


class Space:
    """Row-major axes of these sizes. `spec` gives the spec of each value of one graph."""

    def __init__(self, sizes: tuple[Dim, ...], spec: Callable[[str], TensorSpec]) -> None:
        self.sizes = sizes
        self._spec = spec
        self._groups: dict[tuple[str, tuple[int, ...]], ElementIndex] = {}
        self._operands: dict[IndexedValue, tuple[IndexedValue, ...]] = {}
        self._accesses: dict[IndexedValue, Access] = {}

    def index_over(self, name: str, axes: tuple[int, ...]) -> ElementIndex:
        """The index of a value whose dimensions these axes fill. Raises NotFusibleError."""
        found = self._groups.get((name, axes))
        if found is None:
            found = self._groups[name, axes] = group(self._spec(name).shape, axes, self.sizes)
        return found

    def whole(self, name: str) -> ElementIndex:
        """The index of a value whose dimensions all axes fill."""
        return self.index_over(name, tuple(range(len(self.sizes))))

    def access(self, name: str, index: ElementIndex) -> Access:
        """The address of a value's element. Raises NotFusibleError."""
        found = self._accesses.get((name, index))
        if found is None:
            found = access(name, self._spec(name), index, self.sizes)
            self._accesses[name, index] = found
        return found

    def operands(self, node: Node, index: ElementIndex) -> tuple[IndexedValue, ...]:
        """What a view, a scalar operator or a scan reads for one element of its result."""
        at = (node.name, index)
        found = self._operands.get(at)
        if found is None:
            found = self._operands[at] = self._found_operands(node, index)
        return found

    def _found_operands(self, node: Node, index: ElementIndex) -> tuple[IndexedValue, ...]:
        if is_canonical_view(node):
            return (self._source(node, index),)
        if node.op == PAD:
            return ((node.refs()[0], through_pad(node, index)),)
        return tuple(
            (arg.name, through_broadcast(index, self._spec(arg.name).shape))
            for arg in node.args
            if isinstance(arg, Ref)
        )

    def _source(self, node: Node, index: ElementIndex) -> IndexedValue:
        assert isinstance(node.args[0], Ref)
        source = node.args[0].name
        try:
            return source, through_view(node, self._spec(source), index, self.sizes)
        except NotFusibleError as reason:
            raise NotFusibleError(str(reason), node.name) from reason
