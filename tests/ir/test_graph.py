"""The graph language: sizes, validity, print."""

from __future__ import annotations

import pytest

from fusewright.errors import GraphError
from fusewright.ir.graph import (
    Dim,
    Graph,
    Input,
    Node,
    Ratio,
    Ref,
    TensorSpec,
    contiguous_strides,
    pretty,
    validate,
)

S0 = Dim(1, ("s0",))
SPEC = TensorSpec("float32", (S0, Dim(8)), (Dim(8), Dim(1)))


def graph(*nodes: Node, outputs: tuple[str, ...]) -> Graph:
    return Graph((Input("x", SPEC),), nodes, outputs)


@pytest.mark.parametrize(
    ("left", "right", "quotient"),
    [
        (Dim(12), Dim(4), Dim(3)),
        (Dim(12), Dim(5), None),
        (Dim(64, ("s0",)), Dim(8), Dim(8, ("s0",))),
        (Dim(64, ("s0",)), S0, Dim(64)),
        (Dim(64), S0, None),
        (Dim(6), Dim(0), None),
    ],
)
def test_sizes_divide_only_exactly(left: Dim, right: Dim, quotient: Dim | None) -> None:
    assert left.divided_by(right) == quotient


def test_sizes_are_products() -> None:
    assert str(S0 * 64 * Dim(2, ("s1",))) == "128*s0*s1"
    assert (S0 * 64).at({"s0": 3}) == 192
    assert Dim(0, ("s0",)) == Dim(0)
    assert Ratio("((1.0*s0)/(1.0*s0 + -1.0))").at({"s0": 5}) == 1.25


def test_row_major_strides() -> None:
    assert contiguous_strides((S0, Dim(3), Dim(4))) == (Dim(12), Dim(4), Dim(1))
    assert contiguous_strides((Dim(2), Dim(0), Dim(4))) == (Dim(4), Dim(4), Dim(1))


def test_a_value_must_be_defined_once_and_before_its_use() -> None:
    relu = Node("relu", "relu", (Ref("x"),), (), SPEC)
    validate(graph(relu, outputs=("relu",)))
    with pytest.raises(GraphError, match="reads 'y' before"):
        validate(graph(Node("z", "relu", (Ref("y"),), (), SPEC), outputs=("z",)))
    with pytest.raises(GraphError, match="defined twice"):
        validate(graph(relu, relu, outputs=("relu",)))
    with pytest.raises(GraphError, match="output 'q'"):
        validate(graph(relu, outputs=("q",)))


def test_print_shows_every_part() -> None:
    node = Node("y", "add", (Ref("x"), 2.0), (("alpha", 3),), SPEC, "model.py:7")
    assert pretty(graph(node, outputs=("y",))) == (
        "input x: float32[s0, 8]\n"
        "y: float32[s0, 8] = add(x, 2.0, alpha=3)    # model.py:7\n"
        "return y"
    )


def test_pruning_keeps_what_outputs_need() -> None:
    used = Node("used", "relu", (Ref("x"),), (), SPEC)
    unused = Node("unused", "exp", (Ref("used"),), (), SPEC)
    assert graph(used, unused, outputs=("used",)).pruned().nodes == (used,)
