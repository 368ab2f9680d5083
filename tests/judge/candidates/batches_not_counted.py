"""Statistics are right, but num_batches_tracked stands still."""

# verdict: wrong

import torch
from image import Model
from torch.nn import functional


class ModelNew(Model):
    def forward(self, x):
        n, y = self.norm, self.conv(x)
        y = functional.batch_norm(
            y, n.running_mean, n.running_var, n.weight, n.bias, self.training, n.momentum, n.eps
        )
        y = torch.sigmoid(y)
        return y * y.mean(dim=(2, 3), keepdim=True)
