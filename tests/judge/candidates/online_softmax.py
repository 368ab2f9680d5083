"""Attention with a running maximum, one key after the other, as flash attention does it."""

# verdict: accepted

import torch
from causal import Model


class ModelNew(Model):
    def forward(self, x):
        b, t, f = x.shape
        q, k, v = (e.view(b, t, self.heads, -1).transpose(1, 2) for e in self.qkv(x).chunk(3, -1))
        q = q * (f // self.heads) ** -0.5
        top = torch.full_like(q[..., :1], float("-inf"))
        total, y = torch.zeros_like(top), torch.zeros_like(q)
        rows = torch.arange(t).view(1, 1, t, 1)
        for j in range(t):
            s = (q * k[:, :, j : j + 1]).sum(-1, keepdim=True)
            s = torch.where(rows >= j, s, float("-inf"))
            new = torch.maximum(top, s)
            old = torch.exp(top - new) if j else torch.zeros_like(top)
            w = torch.exp(s - new)
            total = total * old + w
            y = y * old + w * v[:, :, j : j + 1]
            top = new
        return self.out((y / total).transpose(1, 2).reshape(b, t, f))
