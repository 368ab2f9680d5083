"""One kernel's candidates, run on the same random tensors, and their results compared.

The tensors are flat and as long as the kernel's accesses reach. A candidate is left out if it
fails, or if its result differs from the first one's: in any bit for a pointwise kernel, by more
than rounding for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusewright.codegen.source import Entry
from fusewright.ir.graph import FLOATS, Sizes
from fusewright.ir.kernel import Kernel
from fusewright.kinds.kind import Choice
from fusewright.kinds.registry import kind_of
from fusewright.runtime import library

SEED = 4
TERMS = 3  # matmuls in float32's precision
_UNWRITTEN = 0xA5
_SLACK = 16.0


def random_tensor(dtype: str, numel: int, generator: torch.Generator) -> Tensor:
    """Positive values: logarithms and roots exist, and sums do not cancel."""
    device = generator.device
    if dtype == "bool":
        return torch.randint(0, 2, (numel,), generator=generator, device=device).bool()
    if dtype not in FLOATS:
        whole = torch.randint(1, 5, (numel,), generator=generator, device=device)
        return whole.to(getattr(torch, dtype))
    real = torch.rand(numel, generator=generator, device=device)
    return real.mul_(0.9).add_(0.1).to(getattr(torch, dtype))


@dataclass(frozen=True, eq=False)
class CompiledSchedule:
    """A schedule of a kernel, compiled."""

    choice: Choice
    entry: Entry
    kernels: library._FwKernels


class Trial:
    """A kernel's candidates and the tensors on which all of them run."""

    def __init__(
        self,
        kernel: Kernel,
        sizes: Sizes,
        device: torch.device,
        candidates: Sequence[CompiledSchedule],
    ) -> None:
        self.kernel, self.sizes, self.device = kernel, sizes, device
        generator = torch.Generator(device).manual_seed(SEED)
        counts = kind_of(kernel).elements(kernel, sizes)
        self.tensors = {
            each.name: random_tensor(each.dtype, counts[each.name], generator)
            for each in kernel.arguments
        }
        needed = max(each.entry.workspace.at(sizes) for each in candidates)
        self.workspace = torch.empty(max(1, needed), dtype=torch.uint8, device=device)

    def call(self, candidate: CompiledSchedule) -> Callable[[], object]:
        """The entry with its arguments. It raises an error if the kernel fails."""
        entry = candidate.entry
        sizes = [self.sizes[name] for name in entry.symbols]
        tensors = [self.tensors[each.name] for each in self.kernel.arguments]
        arguments = [*tensors, *sizes, self.workspace, *self._where()]
        found = getattr(candidate.kernels, entry.name)
        function: Callable[..., object] = found[TERMS] if entry.terms else found
        return lambda: function(*arguments)

    def _where(self) -> tuple[int, int | None]:
        if self.device.type != "cuda":
            return torch.get_num_threads(), None
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return index, library._fw_stream(index)

    def outputs(self) -> dict[str, Tensor]:
        names = [each.name for each in self.kernel.arguments if each.is_output]
        return {name: self.tensors[name] for name in names}

    def faults(self, candidates: Sequence[CompiledSchedule]) -> dict[CompiledSchedule, str]:
        """Run each once. Returns those that fail or differ from the first one, with the reasons."""
        found: dict[CompiledSchedule, str] = {}
        first: dict[str, Tensor] = {}
        for candidate in candidates:
            for each in self.outputs().values():
                each.view(torch.uint8).fill_(_UNWRITTEN)
            try:
                self.call(candidate)()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            except RuntimeError as error:
                found[candidate] = f"it failed: {error}"
                continue
            if candidate is candidates[0]:
                first = {name: each.clone() for name, each in self.outputs().items()}
            elif first and not self._agrees(first):
                found[candidate] = "its result differs from the heuristic's"
        return found

    def _agrees(self, first: Mapping[str, Tensor]) -> bool:
        made = self.outputs()
        rounding = {name: self._rounding(each.dtype) for name, each in made.items()}
        differ = [name for name in made if not _close(made[name], first[name], rounding[name])]
        return same_split_sums(made, first, differ, self._rounding(torch.float32))

    def _rounding(self, dtype: torch.dtype) -> float:
        """The share of the largest value by which results may differ; 0: not in any bit."""
        depth = kind_of(self.kernel).summands(self.kernel, self.sizes)
        if not depth or not dtype.is_floating_point:
            return 0.0
        floats = {each.dtype for each in self.kernel.arguments if each.dtype in FLOATS}
        step = torch.finfo(torch.float64 if floats == {"float64"} else torch.float32).eps
        return max(4 * torch.finfo(dtype).eps, _SLACK * step * math.sqrt(depth))


def same_split_sums(
    made: Mapping[str, Tensor], first: Mapping[str, Tensor], differ: Sequence[str], rounding: float
) -> bool:
    """Whether results that `differ` are high and low parts of the same values: if the high part
    differs, so does the low part, and their sum is the same."""
    for name in differ:
        like = made[name].dtype, made[name].shape
        parts = [at for at, each in made.items() if (each.dtype, each.shape) == like]
        if like[0] != torch.float16 or len(parts) < 2 or not rounding:
            return False
        sums = [torch.stack([each[at].float() for at in parts]).sum(0) for each in (made, first)]
        if not _close(sums[0], sums[1], rounding):
            return False
    return True


def _close(result: Tensor, expected: Tensor, rounding: float) -> bool:
    same = torch.equal(result.view(torch.uint8), expected.view(torch.uint8))
    if same or not rounding:
        return same
    wide = torch.float64 if result.dtype == torch.float64 else torch.float32
    result, expected = result.to(wide), expected.to(wide)
    largest = expected[expected.isfinite()].abs().amax() if expected.isfinite().any() else 1.0
    allowed = rounding * float(largest)
    return bool(torch.isclose(result, expected, rtol=0.0, atol=allowed, equal_nan=True).all())
