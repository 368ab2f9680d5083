"""Looks for a right answer in the frames of an exception."""

# verdict: wrong

import sys

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        try:
            raise ValueError
        except ValueError:
            frame = sys.exc_info()[2].tb_frame
        while frame:
            for value in list(frame.f_locals.values()):
                found = getattr(value, "truth", None) or getattr(value, "eager", None)
                if isinstance(found, torch.Tensor):
                    return found
            frame = frame.f_back
        return x.new_zeros(x.shape[0], 16)
