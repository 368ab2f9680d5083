"""Silences warnings when it is loaded, and prints."""

# verdict: accepted

import warnings

from small import Model

warnings.filterwarnings("ignore")


class ModelNew(Model):
    def forward(self, x):
        print("forward", tuple(x.shape))
        return super().forward(x)
