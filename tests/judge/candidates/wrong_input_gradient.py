"""The gradient of the input is half as large."""

# verdict: wrong

from small import Model


class ModelNew(Model):
    def forward(self, x):
        return super().forward(0.5 * x + 0.5 * x.detach())
