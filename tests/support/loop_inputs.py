"""Inputs of loop kernels that are hard to reduce: NaN, infinities, lost digits."""

from __future__ import annotations

import torch


def rows_with_extremes(columns: int, dtype: str) -> torch.Tensor:
    """Negative values, a NaN in either element of a pair, infinities, subnormals, zeros."""
    x = torch.randn(8, columns).to(getattr(torch, dtype)) - 9
    middle = columns // 2
    x[1, middle], x[2, min(middle + 1, columns - 1)] = torch.nan, torch.nan
    x[3], x[4, columns - 1] = -torch.inf, torch.inf
    x[5] = torch.finfo(x.dtype).smallest_normal / 4
    x[6], x[7, middle] = -0.0, 0.0
    return x


def hard_rows(columns: int, dtype: str) -> torch.Tensor:
    """Rows whose log Σ e^x is special or loses digits easily. `columns` is at least 10."""
    x = torch.randn(16, columns, dtype=torch.float64) * 3
    x[1, 3], x[2, 5], x[3] = torch.inf, torch.nan, -torch.inf
    x[4, 7], x[5, 0], x[5, columns - 1] = -torch.inf, -torch.inf, torch.inf
    x[6, 1], x[6, columns - 2], x[7, 0] = torch.inf, torch.nan, torch.nan
    x[8] = x[8] + 1e4
    x[9] = x[9] - 1e4
    x[10] = x[10] * 1e4
    x[11] = torch.linspace(0, 1, columns)
    x[12] = torch.linspace(50, -50, columns)
    x[13, :-1], x[13, -1] = -torch.inf, -3.25
    x[14], x[14, 2] = -30.0, 0.37
    x[15] = 6e4
    return x.to(getattr(torch, dtype))
