"""Writes before its weights."""

# verdict: unsafe

import ctypes

from small import Model


class ModelNew(Model):
    def forward(self, x):
        ctypes.memset(self.linear.weight.data_ptr() - 64, 0, 64)
        return super().forward(x)
