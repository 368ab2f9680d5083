"""y = z · sigmoid(z) for z = (batchnorm(linear(x)) + bias) / d, with one bias for all features."""

import torch
from torch import nn

# Full size on a GPU; a size that runs in seconds on a CPU.
FULL = torch.cuda.is_available()
BATCH = 1024 if FULL else 256
IN_FEATURES = 8192 if FULL else 512
OUT_FEATURES = 8192 if FULL else 1024
BN_EPS = 1e-5
BN_MOMENTUM = 0.1
BIAS_SHAPE = (1,)
DIVIDE_VALUE = 2.0


class Model(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bn_eps: float = 1e-5,
        bn_momentum: float = 0.1,
        bias_shape: tuple[int, ...] = (1,),
        divide_value: float = 1.0,
    ) -> None:
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features, eps=bn_eps, momentum=bn_momentum)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.divide_value = divide_value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn(self.matmul(x))
        y = (y + self.bias) / self.divide_value
        return y * torch.sigmoid(y)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[object]:
    return [IN_FEATURES, OUT_FEATURES, BN_EPS, BN_MOMENTUM, BIAS_SHAPE, DIVIDE_VALUE]
