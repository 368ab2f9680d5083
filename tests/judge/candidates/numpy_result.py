"""NumPy computes what needs no gradient."""

# verdict: accepted
# device: cpu

import numpy
import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        weight, bias = self.linear.weight.detach().numpy(), self.linear.bias.detach().numpy()
        product = x.detach().numpy() @ weight.T + bias
        return torch.from_numpy(numpy.tanh(product)) * (self.limit * self.scale)
