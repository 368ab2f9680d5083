"""Shows every stage in few lines: a matmul, a pointwise chain, a softmax (docs/architecture.md)."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(self.linear(x)) * self.scale, dim=-1)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(32, 64)]


def get_init_inputs() -> list[object]:
    return [64]
