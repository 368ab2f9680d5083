"""Turns gradients of weights off."""

# verdict: unsafe wrong

from small import Model


class ModelNew(Model):
    def forward(self, x):
        self.linear.bias.requires_grad_(False)
        return super().forward(x)
