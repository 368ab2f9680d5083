"""A dynamic size that is the length of a matrix's rows, as a multiple of what our matmuls need.

    s1 = shape          becomes          s1 = shape / 8, and each s1 in the program 8·s1

Our matmuls split matrices whose rows begin at multiples of 16 bytes. Rows of any length do not, so
PyTorch's matmul would remain. A program with such a multiple fits fewer sizes. So the batch, which
is the first symbol, stays as it is, and so does a size whose example is no multiple.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from fusewright.ir.graph import Arg, Dim, Graph, Input, Node, Program, Ratio, TensorSpec
from fusewright.rewrite.matmuls import MATMULS, ROW_ELEMENTS


def with_row_multiples(program: Program) -> Program:
    """The program with 8·s for each symbol s that is the length of a matmul's rows."""
    wanted = _row_symbols(program)
    found = {
        each.name: ROW_ELEMENTS
        for each in program.symbols[1:]
        if each.name in wanted and each.example and each.example % ROW_ELEMENTS == 0
    }
    return _in_multiples(program, found) if found else program


def _row_symbols(program: Program) -> set[str]:
    """Symbols that alone make rows of a matmul's operand or result unaligned."""
    graphs = (program.forward, program.inference, program.backward)
    found: set[str] = set()
    for graph in (each for each in graphs if each is not None):
        specs = graph.specs()
        for node in (each for each in graph.nodes if each.op in MATMULS):
            for spec in (node.spec, *(specs[name] for name in node.refs())):
                columns = spec.shape[-1] if spec is not None and spec.shape else Dim()
                if columns.factor % ROW_ELEMENTS and len(columns.symbols) == 1:
                    found.update(columns.symbols)
    return found


def _in_multiples(program: Program, of: Mapping[str, int]) -> Program:
    """The same program, in which each symbol stands for one such part of its size."""

    def text(words: str, one: str) -> str:
        return re.sub(
            r"\b[A-Za-z_]\w*\b",
            lambda found: f"({of[found[0]]}{one}*{found[0]})" if found[0] in of else found[0],
            words,
        )

    def dim(size: Dim) -> Dim:
        factor = size.factor
        for symbol in size.symbols:
            factor *= of.get(symbol, 1)
        return Dim(factor, size.symbols)

    def spec(of_value: TensorSpec) -> TensorSpec:
        shape, strides = tuple(map(dim, of_value.shape)), tuple(map(dim, of_value.strides))
        return replace(of_value, shape=shape, strides=strides)

    def arg(value: Arg) -> Arg:
        match value:
            case Dim():
                return dim(value)
            case Ratio(words):
                return Ratio(text(words, ".0"))
            case tuple():
                return tuple(map(arg, value))
        return value

    def node(each: Node) -> Node:
        kwargs = tuple((key, arg(value)) for key, value in each.kwargs)
        made = None if each.spec is None else spec(each.spec)
        return replace(each, args=tuple(map(arg, each.args)), kwargs=kwargs, spec=made)

    def graph(each: Graph) -> Graph:
        inputs = tuple(Input(one.name, spec(one.spec)) for one in each.inputs)
        outputs = tuple(dim(one) if isinstance(one, Dim) else one for one in each.outputs)
        return Graph(inputs, tuple(map(node, each.nodes)), outputs)

    symbols = (
        replace(each, multiple=each.multiple * n, example=each.example // n)
        for each, n in ((each, of.get(each.name, 1)) for each in program.symbols)
    )
    return replace(
        program,
        symbols=tuple(symbols),
        guards=tuple(text(each, "") for each in program.guards),
        forward=graph(program.forward),
        inference=graph(program.inference),
        backward=graph(program.backward) if program.backward else None,
    )
