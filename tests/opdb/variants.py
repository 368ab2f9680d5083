"""The same call with its tensors laid out in other ways, of other sizes, or of special values.

A variant takes the tensors of a call and gives others back, or None where it does not apply.
Whether eager mode accepts them is found by asking it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Tensors = list[Tensor]


def like(x: Tensor, of: Tensor) -> Tensor:
    """`x` as an input that wants a gradient if `of` does."""
    return x.detach().requires_grad_(of.requires_grad)


def _strided(tensors: Sequence[Tensor]) -> bool:
    return all(each.layout is torch.strided for each in tensors)


def with_gaps(tensors: Sequence[Tensor]) -> Tensors | None:
    """Every second element of the last dimension of a larger tensor."""
    if not _strided(tensors) or not any(each.dim() and each.numel() > 1 for each in tensors):
        return None
    made = []
    for each in tensors:
        if not each.dim():
            made.append(each)
            continue
        wide = each.detach().repeat_interleave(2, dim=-1)
        made.append(like(wide[..., ::2], each))
    return made


def transposed(tensors: Sequence[Tensor]) -> Tensors | None:
    """In memory, the dimensions stand the other way round."""
    if not _strided(tensors) or not any(each.dim() > 1 for each in tensors):
        return None
    return [like(_turned(_turned(each).contiguous()), each) for each in tensors]


def _turned(x: Tensor) -> Tensor:
    return x.detach().permute(tuple(reversed(range(x.dim()))))


def expanded(tensors: Sequence[Tensor]) -> Tensors | None:
    """All rows of the first tensor are one row in memory."""
    first = tensors[0] if tensors else None
    if first is None or not _strided(tensors) or first.dim() == 0 or first.shape[0] < 2:
        return None
    return [like(first[:1].detach().expand(first.shape), first), *tensors[1:]]


def channels_last(tensors: Sequence[Tensor]) -> Tensors | None:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if not _strided(tensors) or not any(each.dim() in formats for each in tensors):
        return None
    return [
        like(each.detach().contiguous(memory_format=formats[each.dim()]), each)
        if each.dim() in formats
        else each
        for each in tensors
    ]


def _resized(tensors: Sequence[Tensor], size: Callable[[Tensor], Tensor]) -> Tensors | None:
    """With another first dimension, wherever it is that of the first tensor."""
    if not tensors or not _strided(tensors) or tensors[0].dim() == 0:
        return None
    batch = tensors[0].shape[0]
    alike = [each.dim() > 0 and each.shape[0] == batch for each in tensors]
    return [
        like(size(each.detach()), each) if same else each
        for each, same in zip(tensors, alike, strict=True)
    ]


def empty(tensors: Sequence[Tensor]) -> Tensors | None:
    """Without rows."""
    if tensors and tensors[0].dim() and not tensors[0].shape[0]:
        return None
    return _resized(tensors, lambda each: each[:0])


def larger(tensors: Sequence[Tensor]) -> Tensors | None:
    """With twice as many rows, and one more."""
    if not tensors or tensors[0].dim() == 0 or tensors[0].shape[0] == 0:
        return None
    return _resized(tensors, lambda each: torch.cat([each, each, each[:1]]))


def numbers(tensors: Sequence[Tensor]) -> Tensors | None:
    """Tensors without dimensions."""
    if not tensors or not _strided(tensors) or not all(each.numel() for each in tensors):
        return None
    if not any(each.dim() for each in tensors):
        return None
    return [like(each.detach().reshape(-1)[0].clone(), each) for each in tensors]


def special_values(dtype: torch.dtype) -> Tensor:
    """Of both signs: zero, denormal, smallest, small, usual, halves, large, largest, infinite."""
    facts = torch.finfo(dtype)
    denormal = facts.smallest_normal / 4
    sizes = [0.0, denormal, facts.smallest_normal, facts.eps, 1e-3, 0.5, 0.7, 1.0, 1.5, 2.0, 2.5]
    sizes += [3.0, 10.0, 20.0, 88.0, 1e4, 3e4, facts.max / 4, facts.max, math.inf]
    found = torch.tensor([*sizes, *(-each for each in sizes), math.nan], dtype=torch.float64)
    return found.to(dtype)


def special(tensors: Sequence[Tensor]) -> Tensors | None:
    """Special values; with several tensors, all pairs of them."""
    floating = [each for each in tensors if each.is_floating_point() and _strided([each])]
    if not floating or len(floating) != len(tensors):
        return None
    values = special_values(floating[0].dtype).to(floating[0].device)
    if len(tensors) == 1:
        return [like(values, tensors[0])]
    left, right = torch.meshgrid(values, values, indexing="ij")
    return [like((right if at % 2 else left).clone(), each) for at, each in enumerate(tensors)]


def strewn(tensors: Sequence[Tensor]) -> Tensors | None:
    """Special values here and there in the first tensor."""
    first = tensors[0] if tensors else None
    if first is None or not first.is_floating_point() or not _strided([first]) or not first.numel():
        return None
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 3e4], dtype=torch.float64)
    made = first.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    places = made[1::7]
    repeated = values.repeat(len(places) // len(values) + 1)[: len(places)]
    places.copy_(repeated)
    return [like(made.view(first.shape), first), *tensors[1:]]


LAYOUTS: dict[str, Callable[[Sequence[Tensor]], Tensors | None]] = {
    "gaps": with_gaps,
    "transposed": transposed,
    "expanded": expanded,
    "channels last": channels_last,
    "empty": empty,
    "numbers": numbers,
}
