"""y = relu(x · Wᵀ + bias), the bias apart from the product."""

import torch
from torch import nn

# Full size on a GPU; a size that runs in seconds on a CPU.
FULL = torch.cuda.is_available()
BATCH = 1024 if FULL else 256
IN_FEATURES = 8192 if FULL else 512
OUT_FEATURES = 8192 if FULL else 1024
BIAS_SHAPE = (OUT_FEATURES,)


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features, bias=False)
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.gemm(x) + self.bias)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[object]:
    return [IN_FEATURES, OUT_FEATURES, BIAS_SHAPE]
