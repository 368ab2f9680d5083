"""What tests of matmul kernels on the host share: an epilogue that stores, and split operands."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusewright.ir.interpret import fp16_scale

PLAIN_EPILOGUE = r"""
namespace {
struct Plain {
  float* out;
  int64_t columns;
  template <int V> struct Elem { float y[V]; };
  template <int V> void load(Elem<V>&, int64_t, int64_t) const {}
  template <int V> void give(Elem<V>& elem, int v, float x) const { elem.y[v] = x; }
  template <int V> void visit(const Elem<V>& elem, int64_t q, int64_t l, int) const {
    for (int v = 0; v < V; ++v) {
      float& place = out[q * columns + l + v];
      if (place != 12345.f) std::abort();  // twice
      place = elem.y[v];
    }
  }
};
using Epilogue = Ends<Plain>;
}  // namespace
"""


def split_rows(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split by rows, the row's length padded to a multiple of eight."""
    largest = torch.where(b.isfinite(), b.abs(), 0).amax(-1, keepdim=True)
    scale = fp16_scale(largest)
    columns = b.shape[-1]
    room = torch.full((*b.shape[:-1], -(-columns // 8) * 8), math.nan, dtype=torch.half)
    hi, lo = room.clone()[..., :columns], room.clone()[..., :columns]
    hi.copy_(b * scale)
    lo.copy_(b * scale - hi.float())
    return hi, lo, 1 / scale


def operands(
    layout: str, p: int, q: int, r: int, batches: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    a = torch.randn((*batches, p, r) if layout[0] == "k" else (*batches, r, p))
    b = torch.randn((*batches, q, r) if layout[1] == "k" else (*batches, r, q))
    left = b if layout[1] == "k" else b.mT
    right = a.mT if layout[0] == "k" else a
    return a, b, left.double() @ right.double()
