"""How emitted files call PyTorch: by its own functions where they mean the same as the operator."""

from __future__ import annotations

import pytest
import torch

from fusewright.emit.python import _FUNCTIONS, Scope, operator, sliced
from fusewright.ir.graph import Arg, Node, Ref

SCOPE = Scope({"x": "x", "y": "y", "i": "i"}, "cpu")
X, Y, PLACES = Ref("x"), Ref("y"), Ref("i")
GIVEN: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Arg, ...]]] = {
    "mm": ((3, 4), (4, 5), (X, Y)),
    "addmm": ((4, 4), (4, 4), (X, Y, X)),
    "bmm": ((2, 3, 4), (2, 4, 5), (X, Y)),
    "baddbmm": ((2, 4, 4), (2, 4, 4), (X, Y, X)),
    "mv": ((3, 4), (4,), (X, Y)),
    "dot": ((4,), (4,), (X, Y)),
    "convolution": (
        (2, 3, 7, 8),
        (3, 4, 2, 3),
        (X, Y, None, (2, 1), (1, 0), (1, 1), True, (1, 0), 1),
    ),
    "cat": ((3, 4), (3, 2), ((X, Y), 1)),
    "embedding": ((9, 4), (1,), (X, PLACES, 2)),
    "permute": ((3, 4, 5), (1,), (X, (2, 0, 1))),
    "reshape": ((3, 4, 5), (1,), (X, (12, 5))),
    "as_strided": ((3, 4, 5), (1,), (X, (2, 3), (1, 7), 4)),
}


@pytest.mark.parametrize("name", sorted(_FUNCTIONS))
def test_functions_mean_what_their_operators_mean(name: str) -> None:
    first, second, args = GIVEN[name]
    callee, given = operator(Node("r", f"aten.{name}.default", args), SCOPE)
    assert callee == f"torch.{name}"
    values = {"x": torch.randn(first), "y": torch.randn(second), "i": torch.tensor([0, 8, 2])}
    text = ", ".join(given)
    ours = eval(f"{callee}({text})", {"torch": torch, **values})
    theirs = eval(f"torch.ops.aten.{name}.default({text})", {"torch": torch, **values})
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_other_operators_go_through_the_dispatcher() -> None:
    node = Node("r", "aten.convolution_backward.default", (X, Y))
    assert operator(node, SCOPE)[0] == "torch.ops.aten.convolution_backward.default"
    node = Node("r", "aten.mm.out", (X, Y), (("out", X),))
    assert operator(node, SCOPE)[0] == "torch.ops.aten.mm.out"


@pytest.mark.parametrize(
    "args",
    [(), (1,), (1, 2), (1, 2, 4), (2, 0, 2**63 - 1), (0, -3, -1), (1, None, 3), (2, 1, 6, 2)],
)
def test_a_slice_is_an_index(args: tuple[Arg, ...]) -> None:
    text = sliced(Node("r", "aten.slice.Tensor", (X, *args)), SCOPE)
    assert text is not None
    x = torch.randn(5, 6, 7)
    ours, theirs = eval(text, {"x": x}), torch.ops.aten.slice.Tensor(x, *args)
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    assert ours.data_ptr() == theirs.data_ptr()


def test_a_slice_from_the_end_stays_an_operator() -> None:
    assert sliced(Node("r", "aten.slice.Tensor", (X, -1, 0, 2)), SCOPE) is None
