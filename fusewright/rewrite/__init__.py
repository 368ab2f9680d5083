"""`Program` → `Program`: canonical operators, then algebra, then smaller values saved for backward.
No pass changes what the program computes."""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.graph import Graph, Program, validate
from fusewright.rewrite.lower import lower
from fusewright.rewrite.packed_masks import pack_flags
from fusewright.rewrite.rules import simplify


def rewrite(program: Program) -> Program:
    """All three graphs of a program in canonical form."""
    canonical = replace(
        program,
        forward=rewrite_graph(program.forward),
        inference=rewrite_graph(program.inference),
        backward=rewrite_graph(program.backward) if program.backward else None,
    )
    packed = pack_flags(canonical)
    for graph in (packed.forward, *((packed.backward,) if packed.backward else ())):
        validate(graph)
    return packed


def rewrite_graph(graph: Graph) -> Graph:
    result = simplify(lower(graph))
    validate(result)
    return result
