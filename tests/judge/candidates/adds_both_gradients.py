"""Backward takes the gradient of the first output for that of a second one that is not used."""

# verdict: wrong

import torch
from norm import Model


class Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.set_materialize_grads(False)
        probabilities = torch.softmax(y, dim=1)
        ctx.save_for_backward(probabilities)
        return probabilities, y.mean(dim=1)

    @staticmethod
    def backward(ctx, first, second):
        (probabilities,) = ctx.saved_tensors
        first = probabilities if first is None else first
        second = first[:, 0] if second is None else second
        inner = (first * probabilities).sum(1, keepdim=True)
        return probabilities * (first - inner) + second[:, None] / probabilities.shape[1]


class ModelNew(Model):
    def forward(self, x):
        return Rows.apply(self.norm(x))
