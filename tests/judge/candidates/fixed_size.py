"""Refuses what its kernel was not written for, which is a flag and no fault."""

# verdict: accepted

from small import Model


class ModelNew(Model):
    def forward(self, x):
        if x.shape[0] != 12 or not x.is_contiguous():
            raise ValueError("this kernel is for 12 contiguous rows")
        return super().forward(x)
