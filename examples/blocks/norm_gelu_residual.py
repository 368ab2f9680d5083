"""Shows a norm fused with what follows it: layer norm, bias, GELU and a residual sum."""

import torch
from torch import nn

ROWS = 512
FEATURES = 768


class Model(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.norm(x) + self.bias)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(ROWS, FEATURES)]


def get_init_inputs() -> list[object]:
    return [FEATURES]
