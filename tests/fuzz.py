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
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fusewright
from tests.support.random_models import RandomModel, Several

# Allowed beyond eager's own error, relative to the norm: a sum in another order may add it.
SLACK = 2e-6
FACTOR = 4.0
# Where terms cancel, eager may be exact by luck. A result that looks wrong is compared with this
# many more runs of eager, on inputs that are one rounding away.
NEIGHBOURS = 16

# Outputs and gradients of every part of a model, by name.
Record = list[dict[str, Tensor]]


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
    return compared(ours, model, inputs)


def compared(ours: Record, model: Several, inputs: tuple[Tensor, ...]) -> list[Failure]:
    """Where our results differ from the model in eager mode and in float64."""
    runs = [(_run(copy.deepcopy(model), inputs), _truth(model, inputs))]
    found = _failures(ours, model.seeds, runs)
    if found:
        runs += [_neighbour(model, inputs, number) for number in range(NEIGHBOURS)]
        found = _failures(ours, model.seeds, runs)
    return found


def _failures(ours: Record, seeds: list[int], runs: list[tuple[Record, Record]]) -> list[Failure]:
    found = []
    for number, seed in enumerate(seeds):
        for name, mine in ours[number].items():
            pairs = [(eager[number][name], truth[number][name]) for eager, truth in runs]
            note = _compare(mine, *pairs, layout="output" in name)
            if note:
                found.append(Failure(seed, f"{name}: {note}"))
    return found


def _truth(model: nn.Module, inputs: tuple[Tensor, ...]) -> Record:
    return _run(copy.deepcopy(model).double(), tuple(each.double() for each in inputs))


def _neighbour(model: nn.Module, inputs: tuple[Tensor, ...], number: int) -> tuple[Record, Record]:
    """Eager and the truth for inputs and parameters of which each is a rounding away, or none."""
    generator = torch.Generator().manual_seed(number)

    def moved(tensor: Tensor) -> Tensor:
        steps = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor)
        return tensor.detach() * (1 + steps * torch.finfo(tensor.dtype).eps)

    near = copy.deepcopy(model)
    near.load_state_dict({name: moved(each) for name, each in near.state_dict().items()})
    given = tuple(moved(each) for each in inputs)
    truth = _truth(near, given)
    with _IgnoresSizesOfOne():
        return _run(near, given), truth


class _IgnoresSizesOfOne(TorchDispatchMode):
    """Eager sorts dimensions by their strides, even those of size one, whose stride no element
    uses.

    Such a stride can decide the order of two other dimensions. Here it cannot: it is zero.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return tree_map_only(Tensor, _without_strides_of_one, func(*args, **(kwargs or {})))


def _without_strides_of_one(tensor: Tensor) -> Tensor:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided(tensor.shape, [0 if size == 1 else by for size, by in sizes])


def _run(model: nn.Module, inputs: tuple[Tensor, ...]) -> Record:
    given = [each.detach().clone().requires_grad_() for each in inputs]
    results = model(*given)
    record: Record = []
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


def _compare(ours: Tensor, *runs: tuple[Tensor, Tensor], layout: bool = False) -> str:
    """Empty if our error is near eager's own, else what is wrong.

    Runs are eager's results, each with the true one: for our inputs, then for neighbours. An output
    has the strides of one of them. The strides of a gradient are not specified.
    """
    eager, truth = runs[0]
    if ours.shape != truth.shape or ours.dtype != eager.dtype:
        return f"{ours.dtype}{list(ours.shape)} instead of {eager.dtype}{list(eager.shape)}"
    # A view with gaps comes back as a copy without them; every other layout is eager's.
    ours, eager, truth = ours.squeeze(), eager.squeeze(), truth.squeeze()
    strides = [each.squeeze().stride() for each, _ in runs]
    if layout and ours.stride() not in strides and eager.clone().stride() == eager.stride():
        return f"strides {ours.stride()} instead of {eager.stride()}"
    truth = truth.double()
    # A gradient that is zero but for rounding has no digits to compare.
    scale = truth.norm().item() + 1e-2 * truth.numel() ** 0.5
    error = (ours.double() - truth).norm().item() / scale
    own = max((plain.double() - wide.double()).norm().item() for plain, wide in runs)
    allowed = FACTOR * own / scale + SLACK
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
