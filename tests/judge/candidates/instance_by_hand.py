"""Instance norm, bias, leaky ReLU, clamp and residual in one autograd.Function."""

# verdict: accepted

import torch
from instance import Model


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, more, skip, eps):
        var, mean = torch.var_mean(x, (2, 3), correction=0, keepdim=True)
        r = torch.rsqrt(var + eps)
        n = (x - mean) * r
        w = weight.view(1, -1, 1, 1)
        z = n * w + (bias.view(1, -1, 1, 1) + more)
        y = torch.where(z > 0, z, 0.1 * z)
        ctx.save_for_backward(n, r, w, z, y)
        return y.clamp(-1.5, 2.0) + skip

    @staticmethod
    def backward(ctx, grad):
        n, r, w, z, y = ctx.saved_tensors
        g = torch.where((y >= -1.5) & (y <= 2.0), grad, 0.0)
        g = torch.where(z > 0, g, 0.1 * g)
        gn = g * w
        gx = r * (gn - gn.mean((2, 3), keepdim=True) - n * (gn * n).mean((2, 3), keepdim=True))
        gb = g.sum((0, 2, 3))
        return gx, (g * n).sum((0, 2, 3)), gb, gb.view(1, -1, 1, 1), grad, None


class ModelNew(Model):
    def forward(self, x, skip):
        n = self.norm
        return Fused.apply(x, n.weight, n.bias, self.bias, skip, n.eps)
