"""Padding by reflection, replication or wrap-around, as a selection among pieces.

Along an axis the result is the part before, the tensor itself and the part after. Each is a view of
the tensor, padded with zeros to the size of the result, and the index decides which one counts. A
loop then reads one element for each element of the result. The result is contiguous, as PyTorch's
is. The gradient is the sum of the pieces, mapped back.

PyTorch's operators stay if sizes are unknown, if three axes are padded, if there are many pieces,
and for gradients of elements that are replicated several times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

LOOPS = ("cuda",)  # devices where this is as fast: on the host it takes up to 13 times as long
MOST_AXES = 2
MOST_PIECES = 9  # of all axes together


@dataclass(frozen=True)
class _Piece:
    """One piece along an axis: result indices `start` to `start + count` hold the elements from
    `first` on, or `first` alone if `single`."""

    start: int
    count: int
    first: int
    single: bool = False

    @property
    def taken(self) -> int:
        return 1 if self.single else self.count

    def of(self, x: Tensor, axis: int) -> Tensor:
        found = x.narrow(axis, self.first, self.taken)
        if self.taken < self.count:
            return found.expand([self.count if at == axis else -1 for at in range(x.dim())])
        return found


@dataclass(frozen=True)
class _Axis:
    at: int
    size: int
    padded: int
    pieces: tuple[_Piece, ...]


_Pieces = Callable[[int, int, int], tuple[_Piece, ...]]


def _reflected(size: int, before: int, after: int) -> tuple[_Piece, ...]:
    """One piece per element: a loop cannot run backwards."""
    left = (_Piece(at, 1, before - at) for at in range(before))
    right = (_Piece(before + size + at, 1, size - 2 - at) for at in range(after))
    return *left, _Piece(before, size, 0), *right


def _replicated(size: int, before: int, after: int) -> tuple[_Piece, ...]:
    left = _Piece(0, before, 0, single=True)
    right = _Piece(before + size, after, size - 1, single=True)
    return left, _Piece(before, size, 0), right


def _circular(size: int, before: int, after: int) -> tuple[_Piece, ...]:
    left, right = _Piece(0, before, size - before), _Piece(before + size, after, 0)
    return left, _Piece(before, size, 0), right


def _axes(x: Tensor, padding: Sequence[Any], pieces: _Pieces) -> tuple[_Axis, ...]:
    """The padded axes; none if PyTorch is to pad, or to refuse."""
    found: list[_Axis] = []
    for number in range(len(padding) // 2):
        at, (before, after) = x.dim() - 1 - number, padding[2 * number : 2 * number + 2]
        size = x.shape[at]
        if (before, after) == (0, 0):
            continue
        if not all(isinstance(each, int) for each in (before, after, size)):
            return ()
        made = [each for each in pieces(size, before, after) if each.count != 0]
        if any(not 0 <= each.first <= size - each.taken or each.count < 0 for each in made):
            return ()
        found.append(_Axis(at, size, before + size + after, tuple(made)))
    few = len(found) <= MOST_AXES and math.prod(len(each.pieces) for each in found) <= MOST_PIECES
    return tuple(found) if few and x.dtype.is_floating_point and x.device.type in LOOPS else ()


def _chosen(view: Tensor, axes: Sequence[_Axis], around: dict[int, tuple[int, int]]) -> Tensor:
    """A selection among pieces along the first axis, each a selection along the other axes."""
    if not axes:
        return _with_zeros(view, around)
    axis, *rest = axes
    parts = []
    for piece in axis.pieces:
        beside = (piece.start, axis.padded - piece.start - piece.count)
        parts.append(_chosen(piece.of(view, axis.at), rest, {**around, axis.at: beside}))
    index = torch.arange(axis.padded, device=view.device)
    index = index.reshape([-1] + [1] * (view.dim() - 1 - axis.at))
    *others, found = parts
    for piece, part in zip(reversed(axis.pieces[:-1]), reversed(others), strict=True):
        found = torch.where(index < piece.start + piece.count, part, found)
    return found


def _pad_gradient(
    grad_output: Tensor, axes: Sequence[_Axis], around: dict[int, tuple[int, int]]
) -> Tensor:
    """The gradient with respect to the padded tensor."""
    if not axes:
        return _with_zeros(grad_output, around)
    axis, *rest = axes
    terms = []
    for piece in axis.pieces:
        beside = (piece.first, axis.size - piece.first - piece.taken)
        part = grad_output.narrow(axis.at, piece.start, piece.count)
        terms.append(_pad_gradient(part, rest, {**around, axis.at: beside}))
    return sum(terms[1:], terms[0])


def _with_zeros(view: Tensor, around: dict[int, tuple[int, int]]) -> Tensor:
    pairs = [around.get(at, (0, 0)) for at in reversed(range(min(around), view.dim()))]
    return pad(view, [number for pair in pairs for number in pair])


def _forward(pieces: _Pieces) -> Callable[..., Any]:
    def padded(x: Tensor, padding: Sequence[Any]) -> Any:
        axes = _axes(x, padding, pieces)
        return _chosen(x.contiguous(), axes, {}) if axes else NotImplemented

    return padded


def _backward(pieces: _Pieces) -> Callable[..., Any]:
    def gradient(grad_output: Tensor, x: Tensor, padding: Sequence[Any]) -> Any:
        axes = _axes(x, padding, pieces)
        many = any(each.count > each.taken for axis in axes for each in axis.pieces)
        return _pad_gradient(grad_output, axes, {}) if axes and not many else NotImplemented

    return gradient


def pad_decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions of PyTorch's padding operators and of their gradients."""
    found: dict[Any, Callable[..., Any]] = {}
    for name, pieces in (("reflection", _reflected), ("replication", _replicated)):
        for rank in range(1, MOST_AXES + 1):
            packets = (
                getattr(torch.ops.aten, f"{name}_pad{rank}d{end}") for end in ("", "_backward")
            )
            forward, backward = (packet.default for packet in packets)
            found |= {forward: _forward(pieces), backward: _backward(pieces)}
    return found


class _Circular(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, axes: tuple[_Axis, ...]) -> Tensor:
        context.axes = axes
        return _chosen(x.contiguous(), axes, {})

    @staticmethod
    def backward(context: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return _pad_gradient(grad_output, context.axes, {}), None


def circular(x: Tensor, padding: Sequence[Any]) -> Any:
    """aten._pad_circular; PyTorch's own decomposition copies the whole tensor for each piece."""
    axes = _axes(x, padding, _circular)
    if axes:
        return _Circular.apply(x, axes)  # type: ignore[no-untyped-call]
    pairs = [padding[at : at + 2] for at in range(0, len(padding), 2)]
    sizes = list(reversed(x.shape))[: len(pairs)]
    known = all(isinstance(each, int) for each in (*padding, *sizes))
    if not known or any(
        not 0 <= each <= size for p, size in zip(pairs, sizes, strict=True) for each in p
    ):
        op = torch.ops.aten._pad_circular.default
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, x, padding)
    x = x.contiguous()  # as the result is
    for number, (before, after) in enumerate(pairs):
        at = x.dim() - 1 - number
        parts = [x.narrow(at, x.shape[at] - before, before), x, x.narrow(at, 0, after)]
        x = torch.cat([part for part in parts if part.shape[at] > 0] or [x], at)
    return x
