"""The gradient of the bias is right in the first ten backwards."""

# verdict: wrong

from small import Model


class ModelNew(Model):
    count = 0

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            self.count += 1
            return y if self.count < 10 else y.detach() + (y - y.detach()) * 0.99
        return y
