"""One kernel's candidates, run beside one another: the same random tensors, results compared.

A kernel is given flat tensors that reach as far as its accesses do. What differs from the first
candidate's result, bit for bit in pointwise kernels and beyond rounding elsewhere, or fails, is
left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusewright.codegen.source import Entry
from fusewright.cost.conv_staged import lines_spec
from fusewright.ir.convolution import WindowKernel
from fusewright.ir.graph import FLOATS, Dim
from fusewright.ir.loop import Access, Load, LoopKernel, Reduce, Scan, Store
from fusewright.ir.matmul import ProductKernel, RawOperand
from fusewright.ir.weight_gradient import GradientKernel
from fusewright.plan.equal_kernels import Kernel
from fusewright.runtime import library
from fusewright.tune.candidates import Choice

Sizes = Mapping[str, int]

SEED = 4
TERMS = 3  # products in float32's precision
_UNWRITTEN = 0xA5
_SLACK = 16.0


def elements(kernel: Kernel, sizes: Sizes) -> dict[str, int]:
    """How many elements of each buffer the kernel may touch."""
    if isinstance(kernel, LoopKernel):
        return _loop_elements(kernel, sizes)
    found = {} if isinstance(kernel, GradientKernel) else _loop_elements(kernel.epilogue, sizes)
    for name, count in _operand_elements(kernel, sizes):
        found[name] = max(count, found.get(name, 0))
    return found


def _operand_elements(
    kernel: ProductKernel | WindowKernel | GradientKernel, sizes: Sizes
) -> Iterator[tuple[str, int]]:
    if not isinstance(kernel, ProductKernel):
        yield from _image_elements(kernel, sizes)
        return
    rows, columns, contracted, batches = kernel.extents(sizes)
    for operand, free in ((kernel.a, columns), (kernel.b, rows)):
        if isinstance(operand, RawOperand):
            strides = (operand.free_stride, operand.contracted_stride, operand.batch_stride)
            yield operand.buffer, _furthest((free, contracted, batches), strides, sizes)
        else:
            stored = batches * (contracted if operand.contracted_rows else rows)
            halves = stored * operand.row_stride.at(sizes)
            yield from ((operand.hi, halves), (operand.lo, halves), (operand.inverse, stored))


def _image_elements(
    kernel: WindowKernel | GradientKernel, sizes: Sizes
) -> Iterator[tuple[str, int]]:
    of, images = kernel.geometry, kernel.geometry.images.at(sizes)
    sources = (images, of.groups * of.channels, *(axis.size for axis in of.axes))
    read = [(kernel.source, sources)]
    if isinstance(kernel, GradientKernel):
        changes = (images, of.groups * of.results, *(axis.result for axis in of.axes))
        read.append((kernel.change, changes))
        if kernel.back is not None:
            yield kernel.back.lines, lines_spec(kernel.back.geometry, "").numel.at(sizes)
    elif kernel.lines:
        yield kernel.lines, lines_spec(kernel.walked, "").numel.at(sizes)
    if kernel.prologue is not None:  # computes the last of them
        reached = _loop_elements(kernel.prologue, sizes)
        given = (each.name for each in kernel.prologue.arguments if not each.is_output)
        yield from ((name, reached[name]) for name in given)
        read.pop()
    for each, counts in read:
        yield each.buffer, _furthest(counts, each.strides, sizes)
    filter_counts = (of.groups, of.results, of.channels, *(axis.taps for axis in of.axes))
    strides = tuple(map(Dim, kernel.filter.strides))
    yield kernel.filter.buffer, _furthest(filter_counts, strides, sizes)


def _furthest(counts: Sequence[int], strides: Sequence[Dim], sizes: Sizes) -> int:
    """How far a buffer reaches that is walked so."""
    moves = zip(counts, strides, strict=True)
    return 1 + sum((count - 1) * stride.at(sizes) for count, stride in moves)


def _loop_elements(kernel: LoopKernel, sizes: Sizes) -> dict[str, int]:
    found = {each.name: 1 for each in kernel.arguments}
    for item in kernel.body:
        if isinstance(item, Load | Store):
            name = item.access.buffer
            found[name] = max(found.get(name, 1), _reach(kernel, item.access, sizes))
    return found


def _reach(kernel: LoopKernel, access: Access, sizes: Sizes) -> int:
    moves = zip(kernel.axes, access.strides, strict=True)
    furthest = sum(max(0, (axis.size.at(sizes) - 1) * step.at(sizes)) for axis, step in moves)
    return 1 + furthest + sum(each.at(sizes) for each in access.offset)


def random_tensor(dtype: str, numel: int, generator: torch.Generator) -> Tensor:
    """Numbers of which logarithms and roots can be taken; sums of them do not cancel."""
    device = generator.device
    if dtype == "bool":
        return torch.randint(0, 2, (numel,), generator=generator, device=device).bool()
    if dtype not in FLOATS:
        whole = torch.randint(1, 5, (numel,), generator=generator, device=device)
        return whole.to(getattr(torch, dtype))
    real = torch.rand(numel, generator=generator, device=device)
    return real.mul_(0.9).add_(0.1).to(getattr(torch, dtype))


@dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule of a kernel, compiled."""

    choice: Choice
    entry: Entry
    kernels: library._FwKernels


class Trial:
    """A kernel's candidates and the tensors that all of them run on."""

    def __init__(
        self, kernel: Kernel, sizes: Sizes, device: torch.device, candidates: Sequence[Candidate]
    ) -> None:
        self.kernel, self.sizes, self.device = kernel, sizes, device
        generator = torch.Generator(device).manual_seed(SEED)
        counts = elements(kernel, sizes)
        self.tensors = {
            each.name: random_tensor(each.dtype, counts[each.name], generator)
            for each in kernel.arguments
        }
        needed = max(each.entry.workspace.at(sizes) for each in candidates)
        self.workspace = torch.empty(max(1, needed), dtype=torch.uint8, device=device)

    def call(self, candidate: Candidate) -> Callable[[], int]:
        """The entry with its arguments; it gives back the entry's code."""
        entry = candidate.entry
        numbers = [self.sizes[name] for name in entry.symbols]
        pointers = [self.tensors[each.name].data_ptr() for each in self.kernel.arguments]
        arguments = [*pointers, *numbers, self.workspace.data_ptr(), *self._where()]
        found = getattr(candidate.kernels, entry.name)
        function: Callable[..., int] = found[TERMS] if entry.terms else found
        return lambda: function(*arguments)

    def _where(self) -> tuple[int, int | None]:
        if self.device.type != "cuda":
            return torch.get_num_threads(), None
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return index, library._fw_stream(index)

    def outputs(self) -> dict[str, Tensor]:
        names = [each.name for each in self.kernel.arguments if each.is_output]
        return {name: self.tensors[name] for name in names}

    def faults(self, candidates: Sequence[Candidate]) -> dict[Candidate, str]:
        """Run each once: those that fail, or whose results differ from the first's, and why."""
        found: dict[Candidate, str] = {}
        first: dict[str, Tensor] = {}
        for candidate in candidates:
            for each in self.outputs().values():
                each.view(torch.uint8).fill_(_UNWRITTEN)
            code = self.call(candidate)()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if code:
                words = candidate.kernels.fw_error_text(code) or b"unknown error"
                found[candidate] = f"it failed with code {code}: {words.decode()}"
            elif candidate is candidates[0]:
                first = {name: each.clone() for name, each in self.outputs().items()}
            elif first and not self._agrees(first):
                found[candidate] = "its result differs from the heuristic's"
        return found

    def _agrees(self, first: Mapping[str, Tensor]) -> bool:
        made = self.outputs()
        apart = [
            name
            for name, each in made.items()
            if not _close(each, first[name], self._rounding(each.dtype))
        ]
        return same_halves(made, first, apart, self._rounding(torch.float32))

    def _rounding(self, dtype: torch.dtype) -> float:
        """The share of the largest number by which results may differ; 0: not by a bit."""
        if isinstance(self.kernel, ProductKernel):
            depth = self.kernel.contracted.at(self.sizes)
        elif isinstance(self.kernel, WindowKernel):
            depth = self.kernel.geometry.channels * self.kernel.geometry.taps
        elif isinstance(self.kernel, GradientKernel):
            of = self.kernel.geometry
            depth = of.images.at(self.sizes) * of.pixels
        elif any(isinstance(item, Reduce | Scan) for item in self.kernel.body):
            depth = self.kernel.inner_numel.at(self.sizes)
        else:
            return 0.0
        if not dtype.is_floating_point:
            return 0.0
        floats = {each.dtype for each in self.kernel.arguments if each.dtype in FLOATS}
        step = torch.finfo(torch.float64 if floats == {"float64"} else torch.float32).eps
        return max(4 * torch.finfo(dtype).eps, _SLACK * step * math.sqrt(max(1, depth)))


def same_halves(
    made: Mapping[str, Tensor], first: Mapping[str, Tensor], apart: Sequence[str], rounding: float
) -> bool:
    """Whether results that are `apart` are halves of the same numbers: what is rounded to another
    first half has another second one, too."""
    for name in apart:
        like = made[name]
        halves = [
            other
            for other, each in made.items()
            if each.dtype == like.dtype == torch.float16 and each.shape == like.shape
        ]
        if len(halves) < 2 or not rounding:
            return False
        mine, theirs = (
            torch.stack([each[at].float() for at in halves]).sum(0) for each in (made, first)
        )
        if not _close(mine, theirs, rounding):
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
