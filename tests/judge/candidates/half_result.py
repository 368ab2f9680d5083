"""Rounds its result to half precision."""

# verdict: wrong

from small import Model


class ModelNew(Model):
    def forward(self, x):
        return super().forward(x).half().float()
