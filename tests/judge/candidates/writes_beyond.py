"""Writes behind its input."""

# verdict: unsafe

import ctypes

from small import Model


class ModelNew(Model):
    def forward(self, x):
        ctypes.memset(x.data_ptr() + x.numel() * 4, 0, 16)
        return super().forward(x)
