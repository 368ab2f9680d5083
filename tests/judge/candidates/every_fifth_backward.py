"""One row of a gradient is left out in every fifth backward, in the hope to pass for a kink."""

# verdict: wrong

import torch
from small import Model


class Linear(torch.autograd.Function):
    count = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        Linear.count += 1
        of_weight = grad.t() @ x
        if Linear.count % 5 == 0:
            of_weight[3] = 0.0
        return grad @ weight, of_weight


class ModelNew(Model):
    def forward(self, x):
        y = Linear.apply(x, self.linear.weight) + self.linear.bias
        return torch.tanh(y) * self.limit * self.scale
