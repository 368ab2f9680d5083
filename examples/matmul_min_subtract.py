"""y = min(linear(x), c) − c, where the scalar c is a parameter and learns."""

import torch
from torch import nn

# Full size on a GPU; a size that runs in seconds on a CPU.
FULL = torch.cuda.is_available()
BATCH = 128
IN_FEATURES = 16384 if FULL else 512
OUT_FEATURES = 16384 if FULL else 1024
CONSTANT = 2.0


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int, constant: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.constant = nn.Parameter(torch.tensor(constant))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.min(y, self.constant) - self.constant


def get_inputs() -> list[torch.Tensor]:
    # Wide enough that linear(x) lands on both sides of the constant.
    return [torch.randn(BATCH, IN_FEATURES) * 4]


def get_init_inputs() -> list[object]:
    return [IN_FEATURES, OUT_FEATURES, CONSTANT]
