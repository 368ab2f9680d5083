"""Loads begin at whole vectors: the address of the input is rounded down."""

# verdict: wrong

import ctypes

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        if not x.is_contiguous():
            return super().forward(x)
        mine = torch.empty_like(x)
        ctypes.memmove(mine.data_ptr(), x.data_ptr() & ~31, x.nbytes)
        return super().forward(x + (mine - x).detach())
