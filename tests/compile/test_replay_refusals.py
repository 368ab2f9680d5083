"""Which plans of a GPU no CUDA graph stands for, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.compile.planning import plan_programs
from fusewright.compile.replayed import refusal
from fusewright.compile.stages import Stages
from fusewright.plan.steps import Call
from tests.support.models import ParametricLambda
from tests.support.on_gpu import captured_for_gpu, on_gpu
from tests.support.plans import CUDA


def refusals(function: Callable[..., Tensor] | nn.Module, *args: Tensor, **how: Any) -> set[str]:
    model = function if isinstance(function, nn.Module) else ParametricLambda(function)
    with captured_for_gpu():
        program = on_gpu(capture(model, args, mode="train"), **how)
        (plans, *_) = plan_programs([program], CUDA, Stages())
    return {refusal(plan) for _, plan in plans.named}


@pytest.mark.parametrize(
    "layer",
    [
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()),
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
        nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    ],
)
def test_usual_layers_are_captured(layer: nn.Module) -> None:
    x = torch.randn((2, 3, 8) if isinstance(layer, nn.TransformerEncoderLayer) else (5, 8))
    assert refusals(layer, x) == {""}


def test_numbers_that_forward_makes_are_constants() -> None:
    def scaled(_: nn.Module, x: Tensor) -> Tensor:
        return torch.relu(x * torch.tensor(0.5))

    assert refusals(scaled, torch.randn(5, 8, requires_grad=True)) == {""}


def test_a_number_on_the_cpu_may_have_another_value_later() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, factor: Tensor) -> Tensor:
            return torch.relu(x) * factor

    found = refusals(Scaled(), torch.randn(5, 8), torch.tensor(2.0), stay=["factor"])
    assert "factor is on the CPU, and a graph would keep its value" in found


def test_operators_that_wait_draw_or_run_on_the_cpu() -> None:
    model = ParametricLambda(lambda _, x: x @ x)
    program = on_gpu(capture(model, (torch.randn(5, 5),), mode="eval"))
    (plans, *_) = plan_programs([program], CUDA, Stages())
    plan = plans.inference
    (step,) = [each for each in plan.steps if isinstance(each, Call)]

    def with_node(**changes: Any) -> str:
        changed = replace(step, node=replace(step.node, **changes))
        steps = tuple(changed if each is step else each for each in plan.steps)
        return refusal(replace(plan, steps=steps))

    assert with_node() == ""
    assert with_node(op="aten.nonzero.default") == "aten.nonzero.default waits for the GPU"
    assert with_node(op="aten._local_scalar_dense.default").endswith("waits for the GPU")
    attention = "aten._scaled_dot_product_flash_attention.default"
    given = (plan.inputs[0].name,) * 3
    said = with_node(op=attention, random=True, args=(*given, 0.5))
    assert said == f"{attention} draws random numbers in its own way"
    assert with_node(op=attention, random=True, args=(*given, 0.0)) == ""
    assert with_node(op=attention, random=True, args=given) == ""
    assert with_node(effect=True) == "aten.mm.default does more than to compute a result"
    specs = {**dict(plan.specs), step.name: replace(dict(plan.specs)[step.name], device="cpu")}
    said = refusal(replace(plan, specs=tuple(specs.items())))
    assert said == f"{step.node.op} runs on the CPU or copies from there"
    quiet = replace(step, node=replace(step.node, op=attention, args=given))
    steps = tuple(quiet if each is step else each for each in plan.steps)
    # Attention without dropout has a seed, and nobody draws from it.
    assert refusal(replace(plan, steps=steps, specs=tuple(specs.items()))) == ""
