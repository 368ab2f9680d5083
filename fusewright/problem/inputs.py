"""A model's input tensors: their device, their values and their layout.

The functions take trees of tensors (a model's arguments) and return everything else as it is.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fusewright.errors import DeviceError
from fusewright.problem.nested import leaves, map_leaves

# Layouts of incoming gradients, such as those that the backward of a sum or a transpose returns.
LAYOUTS = ("contiguous", "expanded", "transposed", "sliced")
# A part of wider rows, as `chunk` returns it: the elements of a row lie side by side.
SPACED = "spaced"
_GAP = 3

# The memory of one tensor: its device, its type and its number of elements.
Block = tuple[torch.device, torch.dtype, int]
# Memory to poison: at most this many blocks or bytes of one size, and a few more than tensors.
_MOST_BLOCKS, _ALL_BLOCKS = 64, 8192
_SWEPT_BYTES = 1 << 25
_SPARE = 2
_SMALLEST_BLOCK = 1024
# glibc then fills each block that it allocates with the bytes 0xfe: -1.7e38 as a float.
_M_PERTURB = -6
_PERTURBATION = 0x01


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def seed_all(number: int) -> None:
    """Seed PyTorch's random numbers.

    `torch.manual_seed` also keeps a note, with its callers, for GPUs that may be used later, which
    takes ten times as long.
    """
    if _has_accelerator():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def resolve_device(device: str | torch.device) -> torch.device:
    """The device with its index; DeviceError if it does not exist."""
    where = torch.device(device)
    if where.type != "cuda":
        return where
    if not torch.cuda.is_available():
        raise DeviceError("PyTorch sees no CUDA device here; use the device cpu")
    index = torch.cuda.current_device() if where.index is None else where.index
    if index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise DeviceError(f"there is no cuda:{index}: PyTorch sees {count} CUDA devices")
    return torch.device("cuda", index)


def move(tree: object, device: torch.device) -> object:
    """The same tree with its tensors on the device, detached from any graph."""

    def moved(leaf: object) -> object:
        return leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf

    return map_leaves(moved, tree)


def is_differentiable(leaf: object) -> bool:
    """Whether this is a tensor that can require a gradient."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def named_tensors(inputs: tuple[object, ...]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among a model's arguments: x0, x1[0], x2['mask']."""
    for index, each in enumerate(inputs):
        for name, leaf in leaves(f"x{index}", each):
            if isinstance(leaf, Tensor):
                yield name, leaf


def copied(inputs: tuple[object, ...], *, gradients: bool) -> tuple[object, ...]:
    """Copies of the inputs; with `gradients`, they require gradients where that is possible."""

    def copy(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(gradients and is_differentiable(leaf))

    return tuple(map_leaves(copy, each) for each in inputs)


def with_nan(leaf: object) -> object:
    """A floating tensor with NaN in up to three elements."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
        return leaf
    flat = leaf.detach().flatten().clone()
    flat[torch.randint(leaf.numel(), (3,), device=leaf.device)] = torch.nan
    spoiled = leaf.detach().clone()
    return spoiled.copy_(flat.view(leaf.shape))


def laid_out(tangent: Tensor, layout: str) -> Tensor:
    """A contiguous tensor's values in another layout; `expanded` repeats the first value."""
    if layout == "contiguous":
        return tangent
    if layout == "expanded":
        first = tangent.flatten()[:1]
        return (first.reshape(()) if first.numel() else first.sum()).expand(tangent.shape)
    if layout == "transposed":
        permuted = tuple(reversed(range(tangent.dim())))
        return tangent.permute(permuted).contiguous().permute(permuted)
    # The elements in between are NaN, or zero.
    between = torch.nan if is_differentiable(tangent) else 0
    if layout == SPACED and tangent.dim():
        *outer, inner = tangent.shape
        return tangent.new_full((*outer, inner + _GAP), between)[..., :inner].copy_(tangent)
    # Every second element of a wider tensor.
    wide = tangent.new_full((*tangent.shape, 2), between)
    sliced = wide[..., 1]
    return sliced.copy_(tangent)


def memory_blocks(values: Iterable[object]) -> tuple[Block, ...]:
    """The memory of the floating tensors among these values."""
    tensors = (each for each in values if isinstance(each, Tensor) and each.is_floating_point())
    return tuple((each.device, each.dtype, each.numel()) for each in tensors)


@contextmanager
def poisoned_memory(blocks: Sequence[Block]) -> Iterator[None]:
    """New tensors of these sizes do not contain the results of earlier runs.

    Free blocks of the allocator are filled with NaN: many of each size, then of half the size, and
    so on for the sizes in between. On the host, glibc also overwrites all memory that it allocates.
    """
    _fill_free_blocks(blocks)
    _mallopt(_M_PERTURB, _PERTURBATION)
    try:
        yield
    finally:
        _mallopt(_M_PERTURB, 0)


def _fill_free_blocks(wanted: Sequence[Block]) -> None:
    sizes = Counter(wanted)
    blocks: list[Tensor] = []
    swept: Counter[tuple[torch.device, int]] = Counter()  # half of one size may be another size
    for device, dtype, numel in sorted(sizes, key=lambda size: -size[2]):
        most = _MOST_BLOCKS if device.type != "cpu" or _is_overwritten() else _ALL_BLOCKS
        least = sizes[device, dtype, numel] + _SPARE
        for part, count in _sweep(numel, dtype.itemsize, least, most):
            taken = (device, part * dtype.itemsize)
            if swept[taken] >= count:
                continue
            swept[taken] = count
            try:
                blocks += _blocks(torch.full((part,), torch.nan, device=device, dtype=dtype), count)
            except torch.OutOfMemoryError:
                break  # the rest is too small for the next tensor, too
    del blocks


def _blocks(block: Tensor, count: int) -> Sequence[Tensor]:
    """`count` copies of this tensor of NaN; one call takes a fifth of the time of many."""
    if block.element_size() == 1:  # these types have no arithmetic
        return [block.clone() for _ in range(count)]
    return torch._foreach_neg([block] * count)


@functools.cache
def _is_overwritten() -> bool:
    """Whether the host's allocator is glibc's; for some processors PyTorch has its own."""
    _mallopt(_M_PERTURB, _PERTURBATION)
    try:
        found = torch.empty(4096, dtype=torch.uint8)
    finally:
        _mallopt(_M_PERTURB, 0)
    return bool((found == (_PERTURBATION ^ 0xFF)).all())


def _sweep(numel: int, itemsize: int, least: int, most: int) -> Iterator[tuple[int, int]]:
    """Sizes in elements and how many blocks of each, from the largest: at least `least` of it."""
    part = numel
    while part:
        yield part, max(least, min(most, _SWEPT_BYTES // (part * itemsize)))
        least = 1
        part = part // 2 if part * itemsize > _SMALLEST_BLOCK else 0


def _mallopt(option: int, value: int) -> None:
    """Set an option of glibc's allocator; other allocators lack this function."""
    found = getattr(ctypes.CDLL(None), "mallopt", None)
    if found is not None:
        found(option, value)


def is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def is_overlapping(tensor: Tensor) -> bool:
    """Whether two elements share an address, as in an expanded tensor."""
    layout = zip(tensor.shape, tensor.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in layout)
