"""Returns zeros."""

# verdict: wrong

from small import Model


class ModelNew(Model):
    def forward(self, x):
        return x.new_zeros(x.shape[0], 16)
