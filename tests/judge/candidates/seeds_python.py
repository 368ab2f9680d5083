"""Seeds Python's random numbers in every call."""

# verdict: unsafe

import random

from small import Model


class ModelNew(Model):
    def forward(self, x):
        random.seed(7)
        return super().forward(x)
