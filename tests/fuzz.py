"""Random graphs against float64, forward and gradients: `python -m tests.fuzz --count 10000`.

Programs are compiled a batch at a time, on all cores. A seed that fails is printed, and
`--first SEED --count 1 --batch 1` repeats it.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor, nn

import fusewright
from tests.random_models import RandomModel, Several

# Beyond eager's own error: what a sum taken in another order may add, relative to the norm.
SLACK = 2e-6
FACTOR = 4.0


@dataclass(frozen=True)
class Failure:
    seed: int
    what: str


def failures(seeds: list[int], device: str = "cpu") -> list[Failure]:
    """Compile the programs of all seeds as one model and compare each with float64."""
    model = Several(seeds).to(device)
    inputs = tuple(each.to(device) for each in model.inputs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = fusewright.optimize(model, inputs, modes=("train",))
        ours = _run(fast, inputs)
    eager = _run(copy.deepcopy(model), inputs)
    truth = _run(copy.deepcopy(model).double(), tuple(each.double() for each in inputs))
    found = []
    for seed, mine, plain, wide in zip(seeds, ours, eager, truth, strict=True):
        for name in wide:
            note = _compare(mine[name], plain[name], wide[name], layout="output" in name)
            if note:
                found.append(Failure(seed, f"{name}: {note}"))
    return found


def _run(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[dict[str, Tensor]]:
    """Outputs and gradients of every part, by name."""
    given = [each.detach().clone().requires_grad_() for each in inputs]
    results = model(*given)
    record: list[dict[str, Tensor]] = []
    roots, tangents = [], []
    for number, outputs in enumerate(results):
        record.append({f"output {i}": t.detach() for i, t in enumerate(outputs)})
        for position, tensor in enumerate(outputs):
            generator = torch.Generator().manual_seed(1000 * number + position)
            tangent = torch.randn(tensor.shape, generator=generator)
            if tensor.requires_grad:
                roots.append(tensor)
                tangents.append(tangent.to(tensor))
    parts = list(getattr(model, "parts", [model]))
    leaves = [*given, *model.parameters()]
    found = torch.autograd.grad(roots, leaves, tangents, allow_unused=True)
    position = 0
    for number, part in enumerate(parts):
        for i in range(len(part.input_shapes)):
            _note(record[number], f"grad input {i}", found[position], leaves[position])
            position += 1
    for number, part in enumerate(parts):
        for i in range(len(part.weights)):
            _note(record[number], f"grad weight {i}", found[position], leaves[position])
            position += 1
    return record


def _note(record: dict[str, Tensor], name: str, gradient: Tensor | None, leaf: Tensor) -> None:
    record[name] = torch.zeros_like(leaf) if gradient is None else gradient.detach()


def _compare(ours: Tensor, eager: Tensor, truth: Tensor, *, layout: bool = False) -> str:
    """Nothing where our error is near eager's own, else what is wrong.

    An output has eager's strides; how a gradient lies in memory is nobody's promise.
    """
    if ours.shape != truth.shape or ours.dtype != eager.dtype:
        return f"{ours.dtype}{list(ours.shape)} instead of {eager.dtype}{list(eager.shape)}"
    # A view with gaps comes back as a copy without them; every other layout is eager's.
    ours, eager, truth = ours.squeeze(), eager.squeeze(), truth.squeeze()
    if layout and ours.stride() != eager.stride() and eager.clone().stride() == eager.stride():
        return f"strides {ours.stride()} instead of {eager.stride()}"
    truth = truth.double()
    # A gradient that is zero but for rounding has no digits to compare.
    scale = truth.norm().item() + 1e-2 * truth.numel() ** 0.5
    error = (ours.double() - truth).norm().item() / scale
    allowed = FACTOR * (eager.double() - truth).norm().item() / scale + SLACK
    if error <= allowed or (allowed != allowed and error != error):
        return ""
    return f"error {error:.2e}, allowed {allowed:.2e}"


def checked(seeds: list[int], device: str) -> list[Failure]:
    """The failures of a batch; one that cannot be compiled is tried seed by seed."""
    try:
        return failures(seeds, device)
    except Exception as error:
        print(f"seeds {seeds[0]}–{seeds[-1]}: {type(error).__name__}: {error}", flush=True)
    found = []
    for seed in seeds:
        try:
            found += failures([seed], device)
        except Exception as alone:
            found.append(Failure(seed, f"{type(alone).__name__}: {alone}"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then end early")
    options = parser.parse_args()
    end = options.first + options.count
    batches = [
        list(range(first, min(first + options.batch, end)))
        for first in range(options.first, end, options.batch)
    ]
    start, done, wrong = time.perf_counter(), 0, 0
    # A thread for each process: more only get in each other's way.
    with ProcessPoolExecutor(
        options.jobs, get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        waiting = {pool.submit(checked, batch, options.device): batch for batch in batches}
        for each in as_completed(waiting):
            for failure in each.result():
                wrong += 1
                print(f"seed {failure.seed}: {failure.what}", flush=True)
            done += len(waiting[each])
            seconds = time.perf_counter() - start
            print(f"{done} graphs, {wrong} wrong, {seconds:.0f} s", flush=True)
            if seconds > options.seconds:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["Failure", "RandomModel", "failures"]
