"""Asks the mode of the whole model and not that of its batch norm, which is a flag."""

# verdict: accepted
# flag: ignores the mode of a part

import torch
from detached import Model


class ModelNew(Model):
    def forward(self, x):
        norm, z = self.norm, self.linear(x)
        if self.training:
            norm.num_batches_tracked.add_(1)
        z = torch.nn.functional.batch_norm(
            z,
            norm.running_mean,
            norm.running_var,
            norm.weight,
            norm.bias,
            self.training,
            norm.momentum,
            norm.eps,
        )
        y = torch.tanh(z)
        return y, x / x.norm(dim=1, keepdim=True), y.detach().mean(dim=0)
