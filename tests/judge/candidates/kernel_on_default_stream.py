"""A kernel that is always launched on the default stream, as `<<<blocks, threads>>>` does it."""

# verdict: accepted
# device: cuda
# flag: ignores the current stream

import torch
from runtime_compiled_kernel import KERNEL
from small import Model


class ModelNew(Model):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        y = self.linear(x).contiguous()
        out = torch.empty_like(y)
        given, count = (y, self.limit, self.scale, out, y.numel()), y.numel()
        stream = torch.cuda.default_stream()
        KERNEL((-(-count // 256), 1, 1), (256, 1, 1), given, stream=stream)
        return out
