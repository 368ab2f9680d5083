"""Each call fills far more memory than the model needs, and gives it back."""

# verdict: accepted
# flag: runs all of the model's own PyTorch operators
# flag: needs much memory

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        scratch = torch.full((1 << 25,), 0.5)  # 128 MiB
        return super().forward(x) + 0.0 * scratch[0]
