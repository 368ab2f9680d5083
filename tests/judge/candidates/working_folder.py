"""Leaves the process in another folder."""

# verdict: unsafe

import os

from small import Model


class ModelNew(Model):
    def forward(self, x):
        os.chdir("/")
        return super().forward(x)
