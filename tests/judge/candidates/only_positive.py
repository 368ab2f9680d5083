"""Right if the input has both signs or is positive."""

# verdict: wrong

from small import Model


class ModelNew(Model):
    def forward(self, x):
        y = super().forward(x)
        return y if bool((x > 0).any()) else y * 0.999
