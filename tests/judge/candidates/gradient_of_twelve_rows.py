"""Gradients of weights have the factor of the example's batch."""

# verdict: wrong

from small import Model


class ModelNew(Model):
    def forward(self, x):
        y = super().forward(x)
        if not y.requires_grad:
            return y
        return y.detach() + (y - y.detach()) * (12.0 / x.shape[0])
