"""Plans of small models, their steps by kind, and values for their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.compile.pipeline import Prepared, prepare
from fusewright.ir.graph import Graph
from fusewright.plan import plan
from fusewright.plan.steps import Call, Plan
from fusewright.rewrite import rewrite
from fusewright.target.target import Target
from tests.support.models import ParametricLambda

CUDA = Target.cuda()


def steps_of(plan: Plan | None, kind: str) -> tuple[Any, ...]:
    """The steps of one kind, in launch order."""
    assert plan is not None
    return tuple(step for step in plan.steps if step.kind == kind)


def input_values(graph: Graph, sizes: dict[str, int]) -> list[Tensor]:
    """Random values for the inputs of a graph at these sizes, the same each time."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for each in graph.inputs:
        shape = [size.at(sizes) for size in each.spec.shape]
        value = torch.randn(shape, generator=generator)
        made.append(value > 0 if each.spec.dtype == "bool" else value)
    return made


def prepared_for_training(model: nn.Module, x: Tensor) -> Prepared:
    """The model's plans for training on a CUDA target."""
    return prepare(model, (x,), modes=("train",), device=x.device, target=CUDA)


def called_operators(*plans: Plan | None) -> list[str]:
    """The operators that stay PyTorch calls in these plans."""
    steps = [step for plan in plans if plan is not None for step in plan.steps]
    return [step.node.op for step in steps if isinstance(step, Call)]


def pytorch_operators(model: nn.Module, *args: Tensor) -> list[str]:
    """The operators that stay PyTorch calls in any plan of the model's training."""
    modes = prepare(model, args, modes=("train",), device=args[0].device).modes
    return called_operators(*(plan for m in modes for plan in (m.forward, m.inference, m.backward)))


def host_plans(function, *args: Tensor, mode: str = "train", **parameters: Tensor):  # type: ignore[no-untyped-def]
    """Plans of inference, forward and backward for the host."""
    program = rewrite(capture(ParametricLambda(function, **parameters), args, mode=mode))
    sizes = program.example_sizes
    graphs = (program.inference, program.forward, program.backward)
    return tuple(plan(each, sizes, Target.host()) if each else None for each in graphs)


def loops_and_calls(plan: Plan) -> list[str]:
    """The kinds of the steps that are loops or calls, in order."""
    return [step.kind for step in plan.steps if step.kind in ("loop", "call")]
