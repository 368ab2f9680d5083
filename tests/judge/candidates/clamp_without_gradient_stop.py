"""Clamped elements still pass their gradient on."""

# verdict: wrong

from instance import Model
from torch.nn import functional as F


class ModelNew(Model):
    def forward(self, x, skip):
        y = F.leaky_relu(self.norm(x) + self.bias, 0.1)
        return y + (y.clamp(-1.5, 2.0) - y).detach() + skip
