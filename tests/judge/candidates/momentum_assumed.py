"""Statistics with the usual momentum, which this model does not have."""

# verdict: wrong

import torch
from image import Model
from torch.nn import functional


class ModelNew(Model):
    def forward(self, x):
        n, y = self.norm, self.conv(x)
        y = functional.batch_norm(
            y, n.running_mean, n.running_var, n.weight, n.bias, self.training, 0.1, n.eps
        )
        if self.training:
            n.num_batches_tracked += 1
        y = torch.sigmoid(y)
        return y * y.mean(dim=(2, 3), keepdim=True)
