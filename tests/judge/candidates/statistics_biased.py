"""Running variance without Bessel's correction."""

# verdict: wrong

import torch
from norm import Model


class ModelNew(Model):
    def forward(self, x):
        n = self.norm
        if not self.training:
            return super().forward(x)
        mean, var = x.mean(0), x.var(0, unbiased=False)
        with torch.no_grad():
            n.running_mean.lerp_(mean, n.momentum)
            n.running_var.lerp_(var, n.momentum)
            n.num_batches_tracked += 1
        y = (x - mean) / torch.sqrt(var + n.eps) * n.weight + n.bias
        return torch.softmax(y, dim=1), y.mean(dim=1)
