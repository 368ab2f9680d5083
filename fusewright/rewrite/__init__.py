"""`Program` → `Program`: canonical operators, then algebra, then smaller values saved for backward.
No pass changes what the program computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fusewright.ir.graph import Graph, Program, validate
from fusewright.rewrite.algebra import with_algebra
from fusewright.rewrite.lower import lower
from fusewright.rewrite.matmul_algebra import RULES
from fusewright.rewrite.packed_masks import pack_flags
from fusewright.rewrite.rules import simplify
from fusewright.rewrite.saved import drop_unread, save_sources


def rewrite(program: Program) -> Program:
    """All three graphs of a program in canonical form."""
    program = save_sources(_each(program, lower, lower))
    program = _each(program, simplify, partial(simplify, is_backward=True))
    program = drop_unread(with_algebra(program, RULES))
    program = pack_flags(program)
    for graph in (program.forward, *((program.backward,) if program.backward else ())):
        validate(graph)
    return program


def rewrite_graph(graph: Graph) -> Graph:
    result = simplify(lower(graph))
    validate(result)
    return result


def _each(
    program: Program, forward: Callable[[Graph], Graph], backward: Callable[[Graph], Graph]
) -> Program:
    """The program with each of its graphs changed."""
    return replace(
        program,
        forward=forward(program.forward),
        inference=forward(program.inference),
        backward=backward(program.backward) if program.backward else None,
    )
