"""The gradient of the input is lost if no weight needs one."""

# verdict: wrong

from small import Model


class ModelNew(Model):
    def forward(self, x):
        y = super().forward(x)
        return y if self.linear.weight.requires_grad else y.detach()
