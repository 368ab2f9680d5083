"""A batch norm by hand that keeps its statistics."""

# verdict: accepted

import torch
from norm import Model


class ModelNew(Model):
    def forward(self, x):
        norm = self.norm
        if self.training:
            mean, var = x.mean(dim=0), x.var(dim=0, unbiased=False)
            with torch.no_grad():
                count = x.shape[0]
                norm.running_mean.lerp_(mean, norm.momentum)
                norm.running_var.lerp_(var * (count / (count - 1)), norm.momentum)
                norm.num_batches_tracked += 1
        else:
            mean, var = norm.running_mean, norm.running_var
        y = (x - mean) * torch.rsqrt(var + norm.eps) * norm.weight + norm.bias
        return torch.softmax(y, dim=1), y.mean(dim=1)
