"""Attributes that forward changes: which inputs and outputs of a program they become."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright.capture import captures
from fusewright.ir.graph import Program
from tests.support import stateful_models as models
from tests.support.stateful_models import BATCH, STATEFUL, WIDTH


def programs(model: nn.Module, **more: Any) -> tuple[Program, ...]:
    return captures(model, (torch.randn(BATCH, WIDTH),), mode="train", **more)


def effects(program: Program) -> list[tuple[str, str]]:
    return [(each.kind, ".".join((*each.owner, each.name))) for each in program.effects]


def held(program: Program) -> dict[str, str]:
    return {".".join((*path, name)): text for path, name, text in program.held}


def test_a_hidden_state_is_an_input_and_an_output() -> None:
    (program,) = programs(models.Cell())
    assert held(program) == {"hidden": "tensor"}
    assert effects(program) == [("set", "hidden")]
    assert program.changed == ("hidden",)
    state = [each for each in program.bindings if each.kind == "constant"]
    assert [(each.path, each.differentiable) for each in state] == [("hidden", True)]
    assert program.output_tree == "(o[0], (o[1],))"
    # The state has the batch's rows: the trace has found that its size is the same.
    assert [symbol.name for symbol in program.symbols] == ["s0"]


def test_a_state_that_is_made_on_demand_has_two_programs() -> None:
    later, first = programs(models.MadeOnDemand())
    assert (held(later), held(first)) == ({"hidden": "tensor"}, {"hidden": "None"})
    assert (later.variant, first.variant) == ("", "_call_1")
    assert effects(later) == effects(first) == [("set", "hidden")]


def test_a_mask_is_set_once() -> None:
    later, first = programs(models.Masked())
    assert effects(first) == [("set", "mask")]
    assert effects(later) == [] and held(later) == {"mask": "tensor"}


def test_values_that_are_only_written_are_no_inputs() -> None:
    (program,) = programs(models.Notes())
    assert held(program) == {}
    assert not any(each.kind == "constant" for each in program.bindings)
    assert sorted(effects(program)) == [
        ("add", "calls"),
        ("add", "samples"),
        ("extend", "history"),
        ("extend", "last"),
        ("set", "attention"),
        ("set", "shape"),
        ("update", "features"),
    ]


def test_a_tensor_that_is_overwritten_in_place_needs_no_copy_of_its_source() -> None:
    (program,) = programs(models.Average())
    assert effects(program) == [("write", "mean")]
    (accumulated,) = programs(models.Accumulated())
    assert effects(accumulated) == [("rewrite", "sum")]

    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.zeros(BATCH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.kept.copy_(x)
            return self.kept * 2

    (copying,) = programs(Copying())
    assert [node.op for node in copying.inference.nodes] == ["aten.mul.Tensor"]
    assert copying.inference.outputs[1] == "x"


def test_an_argument_that_is_kept_is_that_argument() -> None:
    later, _ = programs(models.Difference())
    at = [each.kind for each in later.bindings].index("input")
    assert later.output_tree == f"(o[0], (tensors[{at}],))"


def test_what_another_mode_changes_is_no_constant_of_this_one() -> None:
    (program,) = captures(
        models.CountsTraining(), (torch.randn(BATCH, WIDTH),), mode="eval", changed=["steps"]
    )
    assert program.changed == ("steps",)
    assert not program.held and not program.effects


@pytest.mark.parametrize("kind", STATEFUL, ids=lambda kind: kind.__name__)
def test_the_model_is_left_as_it_was(kind: type[nn.Module]) -> None:
    model = kind()
    tensors = [
        (value, value.clone(), value.grad_fn)
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor)
    ]
    before = [(module, dict(vars(module))) for module in model.modules()]
    programs(model)
    for module, attributes in before:
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())
        assert "__getattribute__" not in vars(type(module))
    for tensor, value, graph in tensors:
        assert torch.equal(tensor, value) and tensor.grad_fn is graph


def test_a_refused_model_is_left_as_it_was_too() -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.step = torch.ones(WIDTH), 1
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.kept.mul_(0.5)
            self.step *= 2
            y: Tensor = self.norm(x) * self.step
            return y

    model = Adding()
    with pytest.raises(Exception, match="the attribute step, which is different at each call"):
        programs(model)
    assert torch.equal(model.kept, torch.ones(WIDTH)) and model.step == 1
    assert int(model.norm.num_batches_tracked or 0) == 0


def test_an_object_may_cache_for_itself() -> None:
    class Config:
        def __init__(self) -> None:
            self.factor = 3
            self.lock = threading.Lock()

        def scale(self) -> int:
            self.__dict__.setdefault("cached", self.factor * 2)
            return int(self.__dict__["cached"])

    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.config.scale()

    (program,) = programs(Configured())
    assert not program.effects and not program.changed
