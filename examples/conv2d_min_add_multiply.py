"""y = (min(conv2d(x), c) + bias) · s with one bias per output channel."""

import torch
from torch import nn

# Full size on a GPU; a size that runs in seconds on a CPU.
FULL = torch.cuda.is_available()
BATCH = 128 if FULL else 8
IN_CHANNELS = 64 if FULL else 16
OUT_CHANNELS = 128 if FULL else 32
SIZE = 128 if FULL else 32
KERNEL_SIZE = 3
CONSTANT = 0.5
SCALE = 2.0


class Model(nn.Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        constant: float,
        scale: float,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.constant = constant
        self.bias = nn.Parameter(torch.randn(out_channels, 1, 1))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        y = torch.clamp(y, max=self.constant)
        return (y + self.bias) * self.scale


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    return [IN_CHANNELS, OUT_CHANNELS, KERNEL_SIZE, CONSTANT, SCALE]
