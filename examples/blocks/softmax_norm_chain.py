"""Shows two reductions in a row: scale, mask and softmax, then each row scaled to length one."""

import torch
from torch import nn

ROWS = 512
COLUMNS = 1000


class Model(nn.Module):
    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(temperature))

    def forward(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shares = torch.softmax(scores / self.temperature + mask, dim=-1)
        return shares / (shares.pow(2).sum(-1, keepdim=True).sqrt() + 1e-6)


def get_inputs() -> list[torch.Tensor]:
    """Scores, and a mask that takes one column in five out of the softmax."""
    hidden = torch.rand(ROWS, COLUMNS) < 0.2
    return [torch.randn(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS).masked_fill(hidden, -1e4)]


def get_init_inputs() -> list[object]:
    return [0.7]
