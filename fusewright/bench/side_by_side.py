"""Eager and one candidate side by side for a few seconds: the times that `optimize` prints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from fusewright.problem.inputs import resolve_device
from fusewright.problem.load import Problem
from fusewright.tune.neighbours import now, other_cores, warning
from fusewright.tune.timing import time_ms
from fusewright.verify.budget import free_memory
from fusewright.verify.feeds import Feed, make_inputs
from fusewright.verify.reference import Reference
from fusewright.verify.run import Subject

Calls = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Times:
    """Median milliseconds by model and pass, such as "eager forward"; why others are missing."""

    ms: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def time_models(
    problem: Problem,
    candidate_factory: Callable[[], nn.Module],
    *,
    device: str | torch.device,
    budget_s: float,
    training: bool = True,
) -> Times:
    """A forward without gradients and, if training, a forward and backward.

    A pass that fails is not timed. Some gradients fail on large inputs in PyTorch itself.
    """
    where = resolve_device(device)
    feed = Feed((make_inputs(problem, where),), seed=0)
    feed.release()
    models = {"eager": problem.make_model().to(where), "ours": candidate_factory().to(where)}
    models["ours"].load_state_dict(models["eager"].state_dict())
    reference = Reference(models["eager"], feed, 0, "train" if training else "eval")
    calls: dict[str, Callable[[], object]] = {}
    notes: list[str] = []
    for gradients in (False, True) if training else (False,):
        what = "forward+backward" if gradients else "forward"
        timed: dict[str, Callable[[], object]] = {}
        for name, model in models.items():
            subject = Subject(model.train(training), feed)
            subject.tangents = reference.tangents
            timed[f"{name} {what}"] = functools.partial(subject.call, gradients, 0)
        failure = _failure(timed)
        calls.update({} if failure else timed)
        notes += [f"{what} was not timed: {failure}"] if failure else []
    free_memory(where)
    before = now()
    ms = time_ms(calls, device=where, budget_s=budget_s) if calls else {}
    busy = warning(other_cores(before, now()))
    notes += [busy] if busy and ms else []
    return Times(ms, tuple(notes))


def _failure(calls: Calls) -> str:
    """Why one of these calls fails; empty if none does."""
    for name, call in calls.items():
        try:
            call()
            call()  # a model that keeps its state with its graph fails at the second step
        except RuntimeError as error:
            words = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
            return f"{name} fails ({words})"
    return ""
