"""The gradient of the second input is wrong if the first needs none."""

# verdict: wrong

from instance import Model


class ModelNew(Model):
    def forward(self, x, skip):
        y = super().forward(x, skip)
        return y if x.requires_grad or not skip.requires_grad else y + 0.5 * (skip.detach() - skip)
