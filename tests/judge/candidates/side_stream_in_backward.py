"""Backward works on a stream that nobody waits for."""

# verdict: dishonest wrong crashed
# device: cuda

import torch
from small import Model


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        of_weight = torch.empty_like(weight)
        with torch.cuda.stream(side):
            large = x.new_ones(4096, 4096)
            for _ in range(4):
                large = large @ large * 1e-4
            of_weight.copy_(grad.t() @ x + 0.0 * large.mean().clamp(0, 1))
        return grad @ weight, of_weight, grad.sum(0)


class ModelNew(Model):
    def forward(self, x):
        y = Product.apply(x, self.linear.weight, self.linear.bias)
        return torch.tanh(y) * self.limit * self.scale
