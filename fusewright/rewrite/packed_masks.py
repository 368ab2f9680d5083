"""Masks that forward saves for backward, several in one byte.

One kernel computes two masks of one value, such as where a minimum was taken and where it was tied.
As bits of one tensor they need one byte per element to write, to store and to read. Masks of
different values are left alone, because packing them would need a kernel of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from fusewright.ir.graph import ForwardOutput, Graph, Input, Node, Program, Ref, TensorSpec
from fusewright.ir.operators import SCALAR_OPS
from fusewright.rewrite.builder import Builder

BITS = 8
PACKED = "uint8"


def pack_flags(program: Program) -> Program:
    """The same program with packed masks; backward unpacks them first."""
    forward, backward = program.forward, program.backward
    if backward is None:
        return program
    first = sum(result.kind != "saved" for result in program.results)
    saved = forward.outputs[first:]
    groups = packed_groups(forward, saved, set(forward.outputs[:first]))
    if not groups:
        return program
    members = {position: group for group in groups for position in group}
    builder = _continued(forward)
    sources = {node.name: node for node in forward.nodes}
    taken_names = set(backward.specs())
    outputs, inputs, bits = list(forward.outputs[:first]), list[Input](), list[Node]()
    for position, name in enumerate(saved):
        taken, group = backward.inputs[position], members.get(position)
        if group is None:
            outputs.append(name)
            inputs.append(taken)
        elif position == group[0]:
            names = [str(saved[at]) for at in group]
            outputs.append(_packed(builder, sources[names[0]], names))
            packed = Input(
                _fresh(f"{taken.name}_flags", taken_names), replace(taken.spec, dtype=PACKED)
            )
            inputs.append(packed)
            bits += [
                node
                for bit, at in enumerate(group)
                for node in _bit(packed, bit, backward.inputs[at], taken_names)
            ]
    kept = program.results[:first]
    kept += tuple(ForwardOutput("saved", index) for index in range(len(outputs) - first))
    return replace(
        program,
        forward=builder.graph(tuple(outputs)),
        results=kept,
        backward=Graph(
            (*inputs, *backward.inputs[len(saved) :]),
            (*bits, *backward.nodes),
            backward.outputs,
        ),
    )


def packed_groups(
    forward: Graph, saved: tuple[object, ...], returned: set[object]
) -> list[tuple[int, ...]]:
    """Groups of positions: saved masks that are computed from the same value."""
    nodes, specs = {node.name: node for node in forward.nodes}, forward.specs()
    found: dict[tuple[str, TensorSpec], list[int]] = {}
    for position, name in enumerate(saved):
        node = nodes.get(name) if isinstance(name, str) and name not in returned else None
        if node is None or saved.count(name) > 1:
            continue
        of = _value_of(node, specs)
        if of is not None and node.spec is not None:
            found.setdefault((of, node.spec), []).append(position)
    return [
        tuple(group[at : at + BITS])
        for group in found.values()
        for at in range(0, len(group), BITS)
        if len(group[at : at + BITS]) > 1
    ]


def _value_of(node: Node, specs: Mapping[str, TensorSpec | None]) -> str | None:
    """The first value of a mask's own shape that it is computed from, element by element."""
    if node.op not in SCALAR_OPS or node.spec is None or node.spec.dtype != "bool":
        return None
    for name in node.refs():
        spec = specs[name]
        if spec is not None and spec.shape == node.spec.shape:
            return name
    return None


def _continued(graph: Graph) -> Builder:
    builder = Builder(graph.inputs)
    for node in graph.nodes:
        builder.add(node)
    return builder


def _packed(builder: Builder, like: Node, names: list[str]) -> str:
    """A new value: the masks as bits, the first one lowest."""
    assert like.spec is not None
    spec = replace(like.spec, dtype=PACKED)
    total: Ref | None = None
    for bit, name in enumerate(names):
        one = builder.add(Node(f"{name}_bit", "cast", (Ref(name),), (), spec, like.source))
        if bit > 0:
            one = builder.add(Node(f"{name}_bit", "mul", (one, 1 << bit), (), spec, like.source))
        if total is not None:
            one = builder.add(
                Node(f"{like.name}_flags", "bitwise_or", (total, one), (), spec, like.source)
            )
        total = one
    assert total is not None
    return total.name


def _bit(packed: Input, bit: int, mask: Input, taken: set[str]) -> list[Node]:
    """The nodes that extract one mask from its bit."""
    name = _fresh(f"{mask.name}_bit", taken)
    one = Node(name, "bitwise_and", (Ref(packed.name), 1 << bit), (), packed.spec)
    return [one, Node(mask.name, "ne", (Ref(one.name), 0), (), mask.spec)]


def _fresh(name: str, taken: set[str]) -> str:
    """The name, with a number if it is taken."""
    numbered = (f"{name}_{count}" for count in itertools.count(1))
    found = next(each for each in itertools.chain([name], numbered) if each not in taken)
    taken.add(found)
    return found
