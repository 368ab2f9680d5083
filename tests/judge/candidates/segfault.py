"""Reads address zero."""

# verdict: crashed

import ctypes

from small import Model


class ModelNew(Model):
    def forward(self, x):
        ctypes.string_at(0)
