"""Saved masks in bits: which are packed, which are not, and that gradients stay the same."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture
from fusewright.ir.graph import (
    ONE,
    Dim,
    ForwardOutput,
    Graph,
    Input,
    Node,
    Program,
    Ref,
    TensorSpec,
)
from fusewright.rewrite import rewrite, rewrite_graph
from fusewright.rewrite.packed_masks import pack_flags, packed_groups


class Minimum(nn.Module):
    """Where it is smaller and where it is tied are two masks of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(self.linear(x), torch.zeros(())) * 2


class Layers(nn.Module):
    """One mask each of two values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.one(x).clamp(max=1))
        return y.clamp(max=1)


def inputs() -> Tensor:
    x = torch.randn(5, 6)
    x[2] = 0.0
    return x


def saved(model: nn.Module) -> tuple[Program, list[str]]:
    program = rewrite(capture(model, (inputs(),), mode="train"))
    specs = program.forward.specs()
    names = [
        name
        for name, result in zip(program.forward.outputs, program.results, strict=True)
        if result.kind == "saved"
    ]
    return program, [
        spec.dtype for name in names if isinstance(name, str) and (spec := specs[name])
    ]


def test_masks_of_one_value_are_packed_into_one_byte() -> None:
    program, dtypes = saved(Minimum())
    assert dtypes.count("uint8") == 1 and "bool" not in dtypes
    assert program.backward is not None
    assert len([each for each in program.results if each.kind == "saved"]) == len(dtypes)
    assert [each.spec.dtype for each in program.backward.inputs].count("uint8") == 1


def test_masks_of_different_values_are_not_packed_together() -> None:
    _, dtypes = saved(Layers())
    assert dtypes.count("bool") == 2 and "uint8" not in dtypes


def test_a_returned_mask_stays_as_it_is() -> None:
    program = capture(Minimum(), (inputs(),), mode="train")
    assert program.backward is not None
    forward = rewrite_graph(program.forward)
    program = replace(program, forward=forward, backward=rewrite_graph(program.backward))
    assert pack_flags(program) != program
    specs = forward.specs()
    mask = next(
        name for name in forward.outputs if (spec := specs[str(name)]) and spec.dtype == "bool"
    )
    returned = replace(forward, outputs=(mask, *forward.outputs))
    program = replace(
        program, forward=returned, results=(ForwardOutput("output", 0), *program.results)
    )
    assert pack_flags(program) == program


def test_a_byte_holds_at_most_eight_masks() -> None:
    shape = (Dim(4),)
    mask, value = (TensorSpec(dtype, shape, (ONE,)) for dtype in ("bool", "float32"))
    names = tuple(f"less_{at}" for at in range(11))
    nodes = tuple(Node(name, "lt", (Ref("y"), at), (), mask) for at, name in enumerate(names))
    groups = packed_groups(Graph((Input("y", value),), nodes, names), names, set())
    assert groups == [tuple(range(8)), (8, 9, 10)]
    ninth = packed_groups(Graph((Input("y", value),), nodes, names[:9]), names[:9], set())
    assert ninth == [tuple(range(8))]


@pytest.mark.parametrize("kind", [Minimum, Layers])
def test_gradients_are_those_of_eager_mode(kind: type[nn.Module]) -> None:
    model, x = kind(), inputs()
    with torch.no_grad():
        model.get_parameter(next(n for n, _ in model.named_parameters() if "bias" in n))[0] = 0.0
    fast = fusewright.optimize(copy.deepcopy(model), (x,))
    found = []
    for each in (model, fast):
        mine = x.clone().requires_grad_()
        made = each(mine)
        made.backward(torch.arange(made.numel(), dtype=made.dtype).view_as(made))
        found.append([mine.grad, *(p.grad for p in each.parameters())])
    for ours, eager in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, eager)


def test_names_of_packed_masks_avoid_those_of_the_model() -> None:
    """A buffer may have the name that packed masks would get."""

    class Named(Minimum):
        def __init__(self, names: list[str]) -> None:
            super().__init__()
            for name in names:
                self.register_buffer(name, torch.full((8,), 3.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * sum(self.buffers(), torch.ones(()))

    program, _ = saved(Named(["plain"]))
    assert program.backward is not None
    invented = [name for name in program.backward.specs() if name.endswith(("_bit", "_flags"))]
    assert len(invented) == 3
    for name in invented:
        _, dtypes = saved(Named([name]))
        assert "uint8" in dtypes
