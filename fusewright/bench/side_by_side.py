"""Eager and one candidate side by side for a few seconds: the times that `optimize` prints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fusewright.problem.inputs import resolve_device
from fusewright.problem.load import Problem
from fusewright.tune.timing import time_ms
from fusewright.verify.feeds import Feed, make_inputs
from fusewright.verify.reference import Reference
from fusewright.verify.run import Subject


def time_models(
    problem: Problem,
    candidate_factory: Callable[[], nn.Module],
    *,
    device: str | torch.device,
    budget_s: float,
    training: bool = True,
) -> Mapping[str, float]:
    """Median ms of a forward without gradients and, if training, of a forward and backward."""
    where = resolve_device(device)
    feed = Feed((make_inputs(problem, where),), seed=0)
    models = {"eager": problem.make_model().to(where), "ours": candidate_factory().to(where)}
    models["ours"].load_state_dict(models["eager"].state_dict())
    reference = Reference(models["eager"], feed, 0, "train" if training else "eval")
    calls: dict[str, Callable[[], object]] = {}
    for gradients in (False, True) if training else (False,):
        for name, model in models.items():
            subject = Subject(model.train(training), feed)
            subject.tangents = reference.tangents
            what = "forward+backward" if gradients else "forward"
            calls[f"{name} {what}"] = functools.partial(subject.call, gradients, 0)
    return time_ms(calls, device=where, budget_s=budget_s)
