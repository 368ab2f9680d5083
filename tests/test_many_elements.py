"""Loops over more than 2^31 elements, and elements more than 2^31 apart, on the host."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fusewright


class Largest(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (x + w).amax(-1)


def test_more_elements_than_32_bits_count() -> None:
    """No tensor has that many elements in memory."""
    rows, columns = 2**16 + 1, 2**15 + 3
    assert rows * columns > 2**31
    x, w = torch.arange(rows).float()[:, None].expand(rows, columns), torch.rand(columns)
    fast = fusewright.optimize(Largest().eval(), (x[:8], w), modes=("eval",))
    with torch.no_grad():
        y = fast(x, w)
    assert torch.equal(y, x[:, 0] + w.max())


class Shifted(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.float() * 2 + 1, x.sum(1)


def test_elements_further_apart_than_32_bits_count() -> None:
    """Of a storage of 2 GB, only the pages with elements are touched."""
    rows, apart = 17, 2**27
    storage = torch.empty(rows * apart, dtype=torch.int8)
    x = storage.as_strided((rows, 5), (apart, 1))
    x.copy_(torch.arange(rows * 5).view(rows, 5) - 40)
    assert (rows - 1) * apart >= 2**31
    fast = fusewright.optimize(Shifted().eval(), x, modes=("eval",))
    with torch.no_grad():
        for y, e in zip(fast(x), Shifted()(x), strict=True):
            assert torch.equal(y, e)
