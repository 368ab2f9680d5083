"""Equations that hold in real arithmetic and save work: each is a rule with a name.

A rule reads the old graph, and builds what stands for a node in the new one. The program keeps the
names of the rules that were used, which the plan shows. FUSEWRIGHT_ALGEBRA=0 leaves all of them
out. Their sums are of float32 and float64, in our loops, so an error is at most eager mode's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fusewright.errors import FusewrightError
from fusewright.ir.graph import Graph, Node, Program, Ref, TensorSpec, validate
from fusewright.rewrite.builder import Builder


def is_wanted() -> bool:
    text = os.environ.get("FUSEWRIGHT_ALGEBRA", "1") or "1"
    if text not in {"0", "1"}:
        raise FusewrightError(f"FUSEWRIGHT_ALGEBRA={text!r}: set it to 0 or 1")
    return text == "1"


@dataclass
class Rewriting:
    """One graph being changed; `used` are the names of the rules so far.

    `is_backward`: outputs are gradients, and their layout is ours to choose.
    """

    graph: Graph
    is_backward: bool
    builder: Builder = field(init=False)
    used: list[str] = field(default_factory=list)
    thin: dict[tuple[str, int], Ref | None] = field(default_factory=dict)
    depth: int = 0

    def __post_init__(self) -> None:
        self.builder = Builder(self.graph.inputs)
        self.made = {node.name: node for node in self.graph.nodes}
        self.given = frozenset(each for each in self.graph.outputs if isinstance(each, str))

    def spec(self, name: str) -> TensorSpec:
        """Of a value of the old graph."""
        spec = self.graph.specs()[name]
        assert spec is not None
        return spec

    def now(self, name: str) -> Ref:
        """What stands for an old value."""
        return Ref(self.builder.names.get(name, name))

    def is_read_once(self, name: str) -> bool:
        return name not in self.given and len(self.graph.users()[name]) == 1


Rewrite = Callable[[Rewriting, Node], Ref | None]


@dataclass(frozen=True)
class Rule:
    """An equation, by its name, and the operators that its left side begins with."""

    name: str
    ops: tuple[str, ...]
    rewrite: Rewrite


def with_algebra(program: Program, rules: tuple[Rule, ...]) -> Program:
    """The program after the rules. It may save values that backward no longer reads.

    What both graphs compute must have the same bits, so it stays as it is in either.
    """
    if not is_wanted() or program.again:
        return program
    backward = program.backward
    ours = frozenset(node.name for node in backward.nodes) if backward else frozenset()
    both = ours.intersection(node.name for node in program.forward.nodes)
    forward = _applied(program.forward, rules, both)
    inference = _applied(program.inference, rules, both)
    made = [forward, inference]
    if backward is not None:
        made.append(_applied(backward, rules, both, is_backward=True))
        backward = made[-1][0]
    used = tuple(dict.fromkeys(name for _, names in made for name in names))
    if not used:
        return program
    return replace(
        program, forward=forward[0], inference=inference[0], backward=backward, algebra=used
    )


def _applied(
    graph: Graph, rules: tuple[Rule, ...], fixed: frozenset[str], *, is_backward: bool = False
) -> tuple[Graph, list[str]]:
    """The graph without change at nodes that are `fixed`, and the rules that were used."""
    ops = {op for rule in rules for op in rule.ops}
    if not any(node.op in ops for node in graph.nodes):
        return graph, []
    state = Rewriting(graph, is_backward)
    for node in graph.nodes:
        rule, found = _first(state, node, rules if node.name not in fixed else ())
        if found is not None:
            state.used.append(rule)
        state.builder.substitute(
            node.name, found or state.builder.add(state.builder.resolved(node))
        )
    if not state.used:
        return graph, []
    made = state.builder.graph(graph.outputs)
    validate(made)
    return made, state.used


def _first(state: Rewriting, node: Node, rules: tuple[Rule, ...]) -> tuple[str, Ref | None]:
    for rule in rules:
        if node.op in rule.ops:
            found = rule.rewrite(state, node)
            if found is not None:
                return rule.name, found
    return "", None
