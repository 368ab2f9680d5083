"""Shows a training loop: the optimized model learns as the original does, step by step."""

import copy

import torch
from torch import nn

import fusewright

STEPS = 20
ROWS = 256


class Classifier(nn.Module):
    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.last = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.gelu(self.norm(self.first(x))))


def train(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """The loss at each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    original = Classifier(32, 128, 4).train()
    x = torch.randn(ROWS, 32)
    labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    # The optimized model shares its model's parameters, so it gets a copy to train.
    fast = fusewright.optimize(copy.deepcopy(original), x, modes=("train",))

    eager, ours = train(original, x, labels), train(fast, x, labels)
    for step in (0, 9, STEPS - 1):
        print(f"step {step + 1:2d}: loss {eager[step]:.6f} eager, {ours[step]:.6f} optimized")
    largest = max(abs(a - b) for a, b in zip(eager, ours, strict=True))
    print(f"largest difference of a loss: {largest:.1e}")


if __name__ == "__main__":
    main()
