"""Tensors for a model to run on: on which device, with which values, in which layout.

All of it takes trees of tensors (a model's arguments) and leaves what is no tensor as it is.
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

# How a gradient may reach a backward: as a sum's or a transpose's backward hands it on, too.
LAYOUTS = ("contiguous", "expanded", "transposed", "sliced")

# Memory to poison: up to so many blocks or bytes of one size, and a few more blocks than tensors.
_MOST_BLOCKS, _ALL_BLOCKS = 64, 8192
_SWEPT_BYTES = 1 << 25
_SPARE = 2
_SMALLEST_BLOCK = 1024
# glibc then fills each block that it hands out with the bytes 0xfe: -1.7e38 as a float.
_M_PERTURB = -6
_PERTURBATION = 0x01


def resolve_device(device: str | torch.device) -> torch.device:
    """The device with its index, or DeviceError where it is not there."""
    where = torch.device(device)
    if where.type != "cuda":
        return where
    if not torch.cuda.is_available():
        raise DeviceError("PyTorch sees no CUDA device here; use the device cpu")
    index = torch.cuda.current_device() if where.index is None else where.index
    if index >= torch.cuda.device_count():
        raise DeviceError(f"there is no cuda:{index}: {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def move(tree: object, device: torch.device) -> object:
    """The same tree with its tensors on the device, cut off from any graph."""

    def moved(leaf: object) -> object:
        return leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf

    return map_leaves(moved, tree)


def is_differentiable(leaf: object) -> bool:
    """Whether a gradient can be asked for."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def named_tensors(inputs: tuple[object, ...]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among a model's arguments: x0, x1[0], x2['mask']."""
    for index, each in enumerate(inputs):
        for name, leaf in leaves(f"x{index}", each):
            if isinstance(leaf, Tensor):
                yield name, leaf


def copied(inputs: tuple[object, ...], *, gradients: bool) -> tuple[object, ...]:
    """Copies that nobody else sees, asking for gradients where that is possible."""

    def copy(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(gradients and is_differentiable(leaf))

    return tuple(map_leaves(copy, each) for each in inputs)


def refilled(
    inputs: tuple[object, ...], kept: dict[int, Tensor], *, gradients: bool
) -> tuple[object, ...]:
    """These values in the very tensors of the call before, which `kept` remembers by position.

    So a result that was remembered by a tensor's address or identity comes out wrong.
    """
    positions = iter(range(2**31))

    def refill(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        position = next(positions)
        mine = kept.get(position)
        if mine is None or _form(mine) != _form(leaf) or _overlaps(leaf):
            mine = leaf.detach() if _overlaps(leaf) else leaf.detach().clone()
            kept[position] = mine
        else:
            with torch.no_grad():
                mine.copy_(leaf)
        return mine.requires_grad_(gradients and is_differentiable(leaf))

    return tuple(map_leaves(refill, each) for each in inputs)


def with_nan(leaf: object) -> object:
    """A floating tensor with NaN in up to three places."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
        return leaf
    flat = leaf.detach().flatten().clone()
    flat[torch.randint(leaf.numel(), (3,), device=leaf.device)] = torch.nan
    spoiled = leaf.detach().clone()
    return spoiled.copy_(flat.view(leaf.shape))


def laid_out(tangent: Tensor, layout: str) -> Tensor:
    """A contiguous gradient's values in another layout; expanded repeats the first of them."""
    if layout == "contiguous":
        return tangent
    if layout == "expanded":
        first = tangent.flatten()[:1]
        return (first.reshape(()) if first.numel() else first.sum()).expand(tangent.shape)
    if layout == "transposed":
        turned = tuple(reversed(range(tangent.dim())))
        return tangent.permute(turned).contiguous().permute(turned)
    # Every second element of a wider tensor, with NaN for whoever reads the ones between.
    wide = tangent.new_full((*tangent.shape, 2), torch.nan)
    sliced = wide[..., 1]
    return sliced.copy_(tangent)


@contextmanager
def poisoned_memory(tensors: Iterable[object]) -> Iterator[None]:
    """New tensors of these sizes hold no numbers of earlier runs, which may be the right ones.

    Blocks that the allocator has free are filled with NaN, many of each size at once and halves
    of it for what lies between them. On the host glibc moreover overwrites all that it hands out.
    """
    _fill_free_blocks([each for each in tensors if isinstance(each, Tensor) and is_floating(each)])
    _mallopt(_M_PERTURB, _PERTURBATION)
    try:
        yield
    finally:
        _mallopt(_M_PERTURB, 0)


def _fill_free_blocks(tensors: Sequence[Tensor]) -> None:
    sizes = Counter((each.device, each.dtype, each.numel()) for each in tensors)
    blocks: list[Tensor] = []
    swept: Counter[tuple[torch.device, int]] = Counter()  # one size's halves are another size
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
                break  # what is left is less than the next tensor needs
    del blocks


def _blocks(block: Tensor, count: int) -> Sequence[Tensor]:
    """So many tensors of NaN, like this one; together they take a fifth of one by one's time."""
    if block.element_size() == 1:  # no arithmetic
        return [block.clone() for _ in range(count)]
    return torch._foreach_neg([block] * count)


@functools.cache
def _is_overwritten() -> bool:
    """Whether the host's allocator is glibc's; PyTorch brings another one for some processors."""
    _mallopt(_M_PERTURB, _PERTURBATION)
    try:
        found = torch.empty(4096, dtype=torch.uint8)
    finally:
        _mallopt(_M_PERTURB, 0)
    return bool((found == (_PERTURBATION ^ 0xFF)).all())


def _sweep(numel: int, itemsize: int, least: int, most: int) -> Iterator[tuple[int, int]]:
    """Of how many elements to take how many blocks, the largest first and `least` of those."""
    part = numel
    while part:
        yield part, max(least, min(most, _SWEPT_BYTES // (part * itemsize)))
        least = 1
        part = part // 2 if part * itemsize > _SMALLEST_BLOCK else 0


def _mallopt(option: int, value: int) -> None:
    """An option of glibc's allocator; other allocators have no such function."""
    found = getattr(ctypes.CDLL(None), "mallopt", None)
    if found is not None:
        found(option, value)


def is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _form(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _overlaps(tensor: Tensor) -> bool:
    """Whether two elements share an address, as in an expanded tensor."""
    layout = zip(tensor.shape, tensor.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in layout)
