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
CONSTANT_VALUE = 0.5
BIAS_SHAPE = (OUT_CHANNELS, 1, 1)
SCALING_FACTOR = 2.0


class Model(nn.Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        constant_value: float,
        bias_shape: tuple[int, ...],
        scaling_factor: float,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.constant_value = constant_value
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scaling_factor = scaling_factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The constant is a tensor on the CPU, also where everything else is on a GPU.
        y = torch.min(self.conv(x), torch.tensor(self.constant_value))
        return (y + self.bias) * self.scaling_factor


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    return [IN_CHANNELS, OUT_CHANNELS, KERNEL_SIZE, CONSTANT_VALUE, BIAS_SHAPE, SCALING_FACTOR]
