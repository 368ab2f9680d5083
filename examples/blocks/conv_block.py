"""Shows a convolutional block: two convolutions with batch norms, a residual sum and ReLU."""

import torch
from torch import nn

# Full size on a GPU; a size that runs in seconds on a CPU.
FULL = torch.cuda.is_available()
IMAGES = 64 if FULL else 4
CHANNELS = 64 if FULL else 16
SIZE = 56 if FULL else 28


class Model(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(IMAGES, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[object]:
    return [CHANNELS]
