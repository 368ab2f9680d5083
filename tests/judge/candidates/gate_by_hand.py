"""A fused gate as an autograd.Function, with a dict of outputs."""

# verdict: accepted

import math

import torch
from gated import Model


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, ramp):
        a, b = h.chunk(2, dim=-1)
        cdf = 0.5 * (1.0 + torch.erf(a * math.sqrt(0.5)))
        ctx.save_for_backward(a, b, cdf, ramp)
        return a * cdf * b * ramp

    @staticmethod
    def backward(ctx, grad):
        a, b, cdf, ramp = ctx.saved_tensors
        grad = grad * ramp
        pdf = torch.exp(-0.5 * a * a) / math.sqrt(2.0 * math.pi)
        return torch.cat([grad * b * (cdf + a * pdf), grad * a * cdf], -1), None


class ModelNew(Model):
    def forward(self, batch, power, keep=True):
        x, mask = batch["x"], batch["mask"]
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, correction=0)
        n = (x - mean) * torch.rsqrt(var + self.norm.eps) * self.norm.weight + self.norm.bias
        y = Gate.apply(self.up(n), self.ramp)
        y = torch.where(mask.unsqueeze(1), y, x)
        return {"y": y, "energy": ((y * y).sum(-1) / y.shape[-1] * power, keep)}
