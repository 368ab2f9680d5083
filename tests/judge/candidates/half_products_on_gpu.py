"""Products in half precision that also accumulate in it."""

# verdict: wrong unsafe
# device: cuda

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        matmul = torch.backends.cuda.matmul
        before = matmul.allow_fp16_accumulation
        matmul.allow_fp16_accumulation = True
        y = (x.half() @ self.linear.weight.half().t()).float() + self.linear.bias
        matmul.allow_fp16_accumulation = before
        return torch.tanh(y) * self.limit * self.scale
