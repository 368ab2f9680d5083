"""Values that backward can make itself are not saved.

A view of a value is saved as that value, and backward takes the view. What forward makes from no
input, such as a triangular mask, backward makes again: it costs no memory, and no kernel writes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from fusewright.capture.naming import renamed
from fusewright.ir.graph import ForwardOutput, Graph, Input, Node, Program, TensorSpec
from fusewright.ir.operators import SCALAR_OPS
from fusewright.rewrite.padding import PAD

_VIEWS = frozenset({"aten.view.default", "aten.permute.default", "aten.expand.default"})
_SPARSE = frozenset({"aten.diag_embed.default"})  # almost all of the result is zero
_MADE = frozenset({"full", "iota", "literal", PAD, "aten.slice.Tensor", *_VIEWS, *SCALAR_OPS})


def save_sources(program: Program) -> Program:
    """The same program, which saves the values behind views, and nothing made from no input."""
    forward, backward = program.forward, program.backward
    if backward is None:
        return program
    first = sum(result.kind != "saved" for result in program.results)
    saved = [name for name in forward.outputs[first:] if isinstance(name, str)]
    kept = {name for name in forward.outputs[:first] if isinstance(name, str)}
    moving = _Moving(forward, kept)
    if not any(moving.moves(name) for name in saved):
        return program
    given, tangents = backward.inputs[: len(saved)], backward.inputs[len(saved) :]
    moving.taken |= {node.name for node in backward.nodes} | {each.name for each in tangents}
    for name, taken in zip(saved, given, strict=True):
        moving.take(name, taken)
    names = {taken.name: moving.names[name] for name, taken in zip(saved, given, strict=True)}
    results = program.results[:first]
    results += tuple(ForwardOutput("saved", index) for index in range(len(moving.inputs)))
    moved = renamed(replace(backward, inputs=tangents), names)
    return replace(
        program,
        forward=replace(forward, outputs=(*forward.outputs[:first], *moving.inputs)).pruned(),
        results=results,
        backward=Graph(
            (*moving.inputs.values(), *moved.inputs),
            (*moving.nodes, *moved.nodes),
            moved.outputs,
        ),
    )


def drop_unread(program: Program) -> Program:
    """The same program without saved values that backward does not read."""
    forward, backward = program.forward, program.backward
    if backward is None:
        return program
    first = sum(result.kind != "saved" for result in program.results)
    read = {name for node in backward.nodes for name in node.refs()} | {*backward.outputs}
    saved = list(zip(forward.outputs[first:], backward.inputs, strict=False))
    kept = [(name, taken) for name, taken in saved if taken.name in read]
    if len(kept) == len(saved):
        return program
    tangents = backward.inputs[len(saved) :]
    outputs = (*forward.outputs[:first], *(name for name, _ in kept))
    results = tuple(ForwardOutput("saved", index) for index in range(len(kept)))
    return replace(
        program,
        forward=replace(forward, outputs=outputs).pruned(),
        results=program.results[:first] + results,
        backward=replace(backward, inputs=(*(taken for _, taken in kept), *tangents)),
    )


@dataclass
class _Moving:
    """The new inputs of backward, by their names in forward, and the nodes that move there.

    `kept` are outputs of the model, which are in memory anyway. `names` says what backward calls a
    value of forward; `taken` are names that it uses.
    """

    forward: Graph
    kept: set[str]
    taken: set[str] = field(default_factory=set)
    inputs: dict[str, Input] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    @cached_property
    def made_by(self) -> dict[str, Node]:
        return {node.name: node for node in self.forward.nodes}

    @cached_property
    def specs(self) -> dict[str, TensorSpec | None]:
        return self.forward.specs()

    @cached_property
    def free(self) -> frozenset[str]:
        """The values that are made from no input."""
        found: set[str] = set()
        for node in self.forward.nodes:
            plain = node.op in _MADE and not node.random and not node.effect
            if plain and all(name in found for name in node.refs()):
                found.add(node.name)
        return frozenset(found)

    def moves(self, name: str) -> bool:
        """Whether backward makes a value itself."""
        node = self.made_by.get(name)
        if node is None or name in self.kept:
            return False
        return name in self.free or node.op in _VIEWS | _SPARSE

    def take(self, name: str, taken: Input | None = None) -> None:
        """Give a value to backward: as an input, or with the nodes that make it."""
        if name in self.names:
            return
        if self.moves(name):
            for read in self.made_by[name].refs():
                self.take(read)
            self.names[name] = self._fresh(name)
            node = self.made_by[name].renamed(self.names)
            self.nodes.append(replace(node, name=self.names[name]))
            return
        spec = taken.spec if taken is not None else self.specs[name]
        assert spec is not None
        self.names[name] = self._fresh(taken.name if taken is not None else name)
        self.inputs[name] = Input(self.names[name], spec)

    def _fresh(self, name: str) -> str:
        found, count = name, 0
        while found in self.taken:
            count += 1
            found = f"{name}_{count}"
        self.taken.add(found)
        return found
