"""Random networks on the kernels of an H200, in emulation, against float64: no GPU is needed.

    python -m tests.fuzz_networks --count 1000

Outputs, gradients and buffers, in training and evaluation, at two batch sizes, in float32 and in
16 bits. `--first SEED --count 1` repeats a seed that failed.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.support.emulated_modules import trained
from tests.support.gpu_on_host import gpu_on_host, optimized_on_host
from tests.support.random_networks import RandomNetwork

# Allowed beyond eager's own error, in units of the dtype's precision, relative to the norm.
SLACK = 25.0
FACTOR = 4.0
# Where terms cancel, eager may be exact by luck: runs of eager one rounding away count as well.
NEIGHBOURS = 6
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


def network_of(seed: int) -> RandomNetwork:
    """A quarter of the networks evaluate. Half of them compute in 16 bits."""
    model = RandomNetwork(seed).to(DTYPES[seed % len(DTYPES)])
    return model.train(seed // len(DTYPES) % 4 != 0)


def failure(seed: int, all_on_tensor_cores: bool) -> str:
    """What is wrong with the network of a seed; empty if nothing is."""
    model = network_of(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    batches = (model.shape[0], model.shape[0] + 3)
    with gpu_on_host(all_on_tensor_cores), warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = optimized_on_host(model, [model.inputs(batches[0]).to(dtype)])
        if fast is None:
            return ""
        return "; ".join(
            f"batch {batch}: {each}"
            for batch in batches
            for each in wrong(fast, model, model.inputs(batch).to(dtype))
        )


def wrong(fast: nn.Module, model: nn.Module, x: Tensor) -> Iterator[str]:
    """Results of one training step that differ from float64 by much more than eager's do."""
    fast.load_state_dict(model.state_dict())
    ours, eagers = trained(fast, x), [_eager(model, x)]
    after, expected = dict(fast.named_buffers()), dict(eagers[0][2].named_buffers())
    eagers += [_eager(*_neighbour(model, x, number)) for number in range(NEIGHBOURS)]
    eps = torch.finfo(x.dtype).eps
    for at, mine in enumerate(ours):
        plain, truth = eagers[0][0][at], eagers[0][1][at]
        if (mine.dtype, mine.shape) != (plain.dtype, plain.shape):
            yield f"result {at}: {mine.dtype}{[*mine.shape]}, not {plain.dtype}{[*plain.shape]}"
            continue
        # A result that is zero but for rounding has no digits to compare.
        scale = float(truth.norm()) + 1e-2 * truth.numel() ** 0.5
        error = float((mine.double() - truth).norm()) / scale
        own = max(float((run[0][at].double() - run[1][at]).norm()) for run in eagers) / scale
        if not error <= FACTOR * own + SLACK * eps:
            yield f"result {at} {tuple(mine.shape)}: error {error:.2e}, eager's {own:.2e}"
    for name, each in expected.items():
        if not torch.allclose(after[name].double(), each.double(), rtol=100 * eps, atol=20 * eps):
            yield f"buffer {name}"


def _eager(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor], nn.Module]:
    """Eager's results, those in float64, and the model after the step."""
    stepped = copy.deepcopy(model)
    return trained(stepped, x), trained(copy.deepcopy(model).double(), x.double()), stepped


def _neighbour(model: nn.Module, x: Tensor, number: int) -> tuple[nn.Module, Tensor]:
    """The model and its argument with parameters and values a rounding away, or none."""
    generator = torch.Generator().manual_seed(number)

    def moved(tensor: Tensor) -> Tensor:
        steps = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor)
        return tensor.detach() * (1 + steps * torch.finfo(tensor.dtype).eps)

    near = copy.deepcopy(model)
    with torch.no_grad():
        for each in near.parameters():
            each.copy_(moved(each))
    return near, moved(x)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, failed = time.perf_counter(), 0
    for seed in range(options.first, options.first + options.count):
        try:
            what = failure(seed, all_on_tensor_cores=seed % 3 == 0)
        except Exception:
            what = traceback.format_exc()
        if what:
            failed += 1
            print(f"seed {seed}: {what}\n{network_of(seed).layers}", flush=True)
        if seed % 10 == 9:
            seconds = time.perf_counter() - start
            print(f"up to seed {seed}: {failed} failed, {seconds:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
