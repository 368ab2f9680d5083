"""The softmax runs over the other dimension, which is as long."""

# verdict: wrong

import torch
from causal import Model


class ModelNew(Model):
    def forward(self, x):
        b, t, f = x.shape
        q, k, v = (e.view(b, t, self.heads, -1).transpose(1, 2) for e in self.qkv(x).chunk(3, -1))
        s = q @ k.transpose(-2, -1) * (f // self.heads) ** -0.5
        s = s.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        return self.out((s.softmax(-2) @ v).transpose(1, 2).reshape(b, t, f))
