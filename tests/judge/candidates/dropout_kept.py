"""Draws dropout's mask as the model does, and multiplies with it in another order."""

# verdict: accepted
# device: cpu (on a GPU, PyTorch's dropout draws other numbers)

import torch
from dropping import Model


class ModelNew(Model):
    def forward(self, x):
        y = torch.tanh(self.first(x))
        if self.training:
            mask = torch.empty_like(y).bernoulli_(0.7)
            y = (y * mask) / 0.7
        return torch.addmm(self.second.bias, y, self.second.weight.t())
