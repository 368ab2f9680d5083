"""Once it was in eval mode, batch norm stays there."""

# verdict: wrong

import torch
from norm import Model
from torch.nn import functional as F


class ModelNew(Model):
    def train(self, mode=True):
        super().train(mode)
        if not mode:
            self.__dict__["stuck"] = True
        return self

    def forward(self, x):
        if self.__dict__.get("stuck"):
            n = self.norm
            y = F.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, False)
            return torch.softmax(y, dim=1), y.mean(dim=1)
        return super().forward(x)
