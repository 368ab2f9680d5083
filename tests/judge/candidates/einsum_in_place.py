"""An einsum, and operators that write into tensors of its own."""

# verdict: accepted

import torch
from small import Model


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, bias, limit, scale):
        y = torch.einsum("ri,oi->ro", x, weight)
        y.add_(bias).tanh_()
        return torch.mul(y, limit * scale), y

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, limit, scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, limit, output[1])
        ctx.scale = scale

    @staticmethod
    def backward(ctx, gradient, _):
        x, weight, limit, y = ctx.saved_tensors
        inner = torch.addcmul(torch.ones_like(y), y, y, value=-1)
        inner.mul_(gradient).mul_(limit * ctx.scale)
        of_limit = (gradient * y).sum().mul_(ctx.scale)
        return inner @ weight, inner.t() @ x, inner.sum(0), of_limit, None


class ModelNew(Model):
    def forward(self, x):
        linear = self.linear
        return Scaled.apply(x, linear.weight, linear.bias, self.limit, self.scale)[0]
