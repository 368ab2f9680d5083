"""F.scaled_dot_product_attention in place of the matmuls."""

# verdict: accepted

from causal import Model
from torch.nn import functional as F


class ModelNew(Model):
    def forward(self, x):
        b, t, f = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.heads, f // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, f))
