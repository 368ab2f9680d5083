"""Each position sees the next one, too."""

# verdict: wrong

import torch
from causal import Model
from torch.nn import functional as F


class ModelNew(Model):
    def forward(self, x):
        b, t, f = x.shape
        q, k, v = (e.view(b, t, self.heads, -1).transpose(1, 2) for e in self.qkv(x).chunk(3, -1))
        mask = torch.ones(t, t, dtype=torch.bool).tril(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, f))
