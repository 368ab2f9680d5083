"""The number of the example instead of the argument."""

# verdict: wrong

from gated import Model


class ModelNew(Model):
    def forward(self, batch, power, keep=True):
        return super().forward(batch, 0.5, True)
