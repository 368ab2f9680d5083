"""No division by zero in NumPy is told to anybody any more."""

# verdict: unsafe

import numpy
from small import Model


class ModelNew(Model):
    def forward(self, x):
        numpy.seterr(all="ignore")
        return super().forward(x)
