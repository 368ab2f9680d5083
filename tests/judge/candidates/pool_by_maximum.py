"""A pool by amax: equal elements share the gradient, where PyTorch's pool gives it to the first."""

# verdict: accepted
# flag: has other gradients

from windows import Model


class ModelNew(Model):
    def forward(self, x):
        y = (x * self.weight).unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2))
        return (y + 0.1).clamp_min(0)
