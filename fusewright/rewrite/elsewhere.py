"""Numbers on another device than the kernels', such as torch.tensor(0.5) next to CUDA tensors.

A value that a graph makes from no input is the same on every device, so a loop makes it where it
runs. Another value without dimensions is copied to the kernels' device: there it is an operand like
any other, and no PyTorch call splits a chain of pointwise operators. The original stays for calls
and outputs that need it where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fusewright.ir.graph import LOOP_DTYPES, Node, Ref, Symbolic
from fusewright.rewrite.builder import Builder

LITERAL = "literal"
Lowered = Callable[[Node], Ref | None]


@dataclass
class Elsewhere:
    """Values on other devices, by name, each with the name of the same value on `device`.

    `made` are those that no input is needed for.
    """

    builder: Builder
    device: str
    lowered: Lowered
    here: dict[str, str] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for each in self.builder.inputs:
            self._copy(each.name)

    def reading(self, node: Node) -> Node:
        """A node of the kernels' device that reads its operands there, if that is possible."""
        if node.spec is None or node.spec.device != self.device:
            return node
        return node.renamed(self.here)

    def note(self, node: Node, name: str) -> None:
        """A node was added under this name. If it is elsewhere, make the same value here."""
        if node.random or node.effect or node.spec is None:
            return self._copy(name)
        free = all(read in self.made for read in node.refs())
        if free:
            self.made.add(name)
        if node.spec.device == self.device:
            return None
        if all(read in self.here for read in node.refs()) and (free or not node.spec.shape):
            near = replace(node.renamed(self.here), spec=replace(node.spec, device=self.device))
            made = self.lowered(near)
            made = self.builder.add(near) if made is None and node.op == LITERAL else made
            if made is not None:
                self.here[name] = made.name
                return None
        return self._copy(name)

    def _copy(self, name: str) -> None:
        """Copy a value without dimensions; the program does not wait for it."""
        spec = self.builder.specs[name]
        if (
            spec is None
            or spec.shape
            or spec.device == self.device
            or spec.dtype not in LOOP_DTYPES
        ):
            return
        options = (("device", Symbolic("device", self.device)), ("non_blocking", True))
        near = replace(spec, device=self.device)
        copy = Node(f"{name}_here", "aten._to_copy.default", (Ref(name),), options, near)
        self.here[name] = self.builder.add(copy).name
