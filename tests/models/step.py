"""One training step of a real model: ours and eager mode's, both against float64."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import fusewright
from tests.models.zoo import Case

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Step:
    """The outputs of a step, and gradients and buffers after it, by their names."""

    values: dict[str, torch.Tensor]

    def errors(self, exact: Step) -> dict[str, float]:
        """The relative error of each value, by the norm."""
        if missing := self.values.keys() ^ exact.values.keys():
            raise AssertionError(f"only one of two steps has {sorted(missing)}")
        pairs = ((name, self.values[name], exact.values[name]) for name in exact.values)
        return {name: _error(mine, wanted) for name, mine, wanted in pairs}


def _error(mine: torch.Tensor, exact: torch.Tensor) -> float:
    if mine.shape != exact.shape:
        raise AssertionError(f"a shape is {tuple(mine.shape)} instead of {tuple(exact.shape)}")
    scale = float(exact.double().norm())
    apart = float((mine.double() - exact.double()).norm())
    return apart / scale if scale > 1e-6 else apart


def step(case: Case, forward: Forward, model: nn.Module, autocast: bool = False) -> Step:
    """One forward and backward of `forward`, which runs `model`, with the case's arguments."""
    model.train()
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    args, kwargs = pytree.tree_map(lambda each: _given(each, dtype), (case.args, case.kwargs))
    under = torch.autocast(case.device, torch.bfloat16) if autocast else nullcontext()
    with under:
        made = tensors_of(forward(*args, **kwargs))
    outputs = [each for each in made if each.is_floating_point()]
    torch.manual_seed(1)
    weighted = [(each * torch.randn(each.shape).to(each)).sum() for each in outputs]
    torch.stack([each.to(dtype) for each in weighted]).sum().backward()
    values = {f"output {at}": each.detach() for at, each in enumerate(outputs)}
    values |= {f"gradient of {name}": grad for name, grad in _gradients(model)}
    inputs = [each for each in tensors_of((args, kwargs)) if each.requires_grad]
    grads = [(at, each.grad) for at, each in enumerate(inputs)]
    values |= {f"gradient of input {at}": grad for at, grad in grads if grad is not None}
    return Step(values | {name: each.clone() for name, each in model.named_buffers()})


def _gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, each in model.named_parameters():
        if each.grad is not None:
            yield name, each.grad.clone()


def _given(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().to(dtype).requires_grad_()
    return value


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(outputs) if isinstance(each, torch.Tensor)]


@dataclass(frozen=True)
class Verdict:
    """The values whose error is too large, with ours and eager mode's; and the largest errors.

    `facts` are the numbers of graphs, graph breaks and PyTorch calls, and the seconds that the
    first step took longer than eager mode's.
    """

    wrong: dict[str, tuple[float, float]]
    ours: float
    eager: float
    facts: dict[str, float]


def compared(case: Case, autocast: bool = False) -> Verdict:
    """Whether a step of the optimized model is as exact as eager mode's.

    Rounding differs from kernel to kernel. Ours may be off by four times as much as eager mode's
    for the same value, or as much as eager mode's worst one.
    """
    exact_model = copy.deepcopy(case.model).double()
    exact = step(case, exact_model, exact_model)
    plain = copy.deepcopy(case.model)
    start = time.perf_counter()
    eager = step(case, plain, plain, autocast).errors(exact)
    after_eager = time.perf_counter()
    model = copy.deepcopy(case.model)
    with torch.autocast(case.device, torch.bfloat16, enabled=autocast):
        fast = fusewright.optimize(model, case.args, case.kwargs)
    ours = step(case, fast, model, autocast).errors(exact)
    seconds = (time.perf_counter() - after_eager) - (after_eager - start)
    least, worst = 1e-2 if autocast else 4e-6, max(eager.values())
    far = {name: e for name, e in ours.items() if not e <= max(4 * eager[name], least, worst)}
    wrong = {name: (error, eager[name]) for name, error in far.items()}
    return Verdict(wrong, max(ours.values()), worst, {**_facts(fast), "seconds": seconds})


def _facts(fast: nn.Module) -> dict[str, float]:
    told = fusewright.explain(fast)
    calls = sum(len(each.calls) for each in told.graphs)
    return {"graphs": len(told.graphs), "breaks": len(told.breaks), "calls left": calls}


def by_inductor(case: Case) -> dict[str, float]:
    """The graph breaks of torch.compile, and the seconds of its first step beyond eager mode's."""
    plain, model = copy.deepcopy(case.model), copy.deepcopy(case.model)
    start = time.perf_counter()
    step(case, plain, plain)
    after_eager = time.perf_counter()
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    step(case, torch.compile(model), model)
    seconds = (time.perf_counter() - after_eager) - (after_eager - start)
    return {"breaks": sum(counters["graph_break"].values()), "seconds": seconds}
