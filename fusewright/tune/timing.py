"""How long calls take beside one another: medians of one interleaved run.

On a GPU the time is that between two events on the current stream, after the second-level cache
was overwritten; on a CPU it is the wall clock's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fusewright.problem.inputs import copied, move, resolve_device
from fusewright.problem.load import Problem
from fusewright.problem.nested import leaves

_WARM_UPS = 2
_MOST_ROUNDS = 200
_FLUSH_BYTES = 256 * 2**20  # Several times the largest second-level cache (H200: 50 MiB).


@dataclass(frozen=True)
class _Clock:
    device: torch.device
    flush: Tensor | None

    def ms(self, call: Callable[[], object]) -> float:
        if self.flush is None:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        begin, end = _event(), _event()
        # The flush also keeps the GPU busy while the call is being launched.
        self.flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_ms(
    candidates: Mapping[str, Callable[[], object]],
    *,
    device: str | torch.device,
    budget_s: float,
) -> Mapping[str, float]:
    """The median milliseconds of each call; all take turns until the budget is spent."""
    taken = samples_ms(candidates, device=device, budget_s=budget_s)
    return {name: statistics.median(each) for name, each in taken.items()}


def samples_ms(
    candidates: Mapping[str, Callable[[], object]],
    *,
    device: str | torch.device,
    budget_s: float,
    least_rounds: int = 1,
) -> dict[str, list[float]]:
    """The milliseconds of each call in every round."""
    where = resolve_device(device)
    on_gpu = where.type == "cuda"
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=where) if on_gpu else None
    clock = _Clock(where, flush)
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for call in candidates.values():
        for _ in range(_WARM_UPS):
            call()
    start = time.perf_counter()
    for round_ in range(_MOST_ROUNDS):
        # Every second round runs backwards, so that nobody always follows the same neighbour.
        for name in names if round_ % 2 == 0 else reversed(names):
            samples[name].append(clock.ms(candidates[name]))
        if round_ + 1 >= least_rounds and time.perf_counter() - start > budget_s:
            break
    return samples


def time_models(
    problem: Problem,
    candidate_factory: Callable[[], nn.Module],
    *,
    device: str | torch.device,
    budget_s: float,
    training: bool = True,
) -> Mapping[str, float]:
    """Eager and candidate, forward without gradients and (when training) forward and backward."""
    where = resolve_device(device)
    inputs = tuple(move(each, where) for each in problem.make_inputs())
    calls: dict[str, Callable[[], object]] = {}
    models = {"eager": problem.make_model().to(where), "ours": candidate_factory().to(where)}
    models["ours"].load_state_dict(models["eager"].state_dict())
    for name, model in models.items():
        model.train(training)
        calls[f"{name} forward"] = _forward_call(model, inputs)
    if training:
        for name, model in models.items():
            calls[f"{name} forward+backward"] = _training_call(model, inputs)
    return time_ms(calls, device=where, budget_s=budget_s)


def _forward_call(model: nn.Module, inputs: tuple[object, ...]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return model(*inputs)

    return call


def _training_call(model: nn.Module, inputs: tuple[object, ...]) -> Callable[[], object]:
    given = copied(inputs, gradients=True)
    targets = [leaf for _, leaf in leaves("", given) if isinstance(leaf, Tensor)]
    targets = [leaf for leaf in (*targets, *model.parameters()) if leaf.requires_grad]
    ones: dict[str, Tensor] = {}

    def call() -> object:
        found = leaves("output", model(*given))
        roots = {n: t for n, t in found if isinstance(t, Tensor) and t.requires_grad}
        if not roots:
            return None
        if not ones:  # Made in the warm-up: filling them is not the model's work.
            ones.update((name, torch.ones_like(root)) for name, root in roots.items())
        seeds = [ones[name] for name in roots]
        return torch.autograd.grad(list(roots.values()), targets, seeds, allow_unused=True)

    return call
