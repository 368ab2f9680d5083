"""Returns a list where the model returns a tuple."""

# verdict: wrong

from norm import Model


class ModelNew(Model):
    def forward(self, x):
        return list(super().forward(x))
