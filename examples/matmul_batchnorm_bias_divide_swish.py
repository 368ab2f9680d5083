"""y = z · sigmoid(z) for z = (batchnorm(linear(x)) + bias) / d, with one bias for all features."""

import torch
from torch import nn

# Full size on a GPU; a size that runs in seconds on a CPU.
FULL = torch.cuda.is_available()
BATCH = 1024 if FULL else 256
IN_FEATURES = 8192 if FULL else 512
OUT_FEATURES = 8192 if FULL else 1024
DIVISOR = 2.0


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int, divisor: float) -> None:
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features)
        self.bias = nn.Parameter(torch.randn(1))
        self.divisor = divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn(self.matmul(x))
        y = (y + self.bias) / self.divisor
        return y * torch.sigmoid(y)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[object]:
    return [IN_FEATURES, OUT_FEATURES, DIVISOR]
