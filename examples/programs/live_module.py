"""Shows `fusewright.optimize` in a program: shared parameters, other batches, a saved state."""

import torch
from torch import nn

import fusewright


class Gate(nn.Module):
    """An RMS norm, then a gate made of the same numbers."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return y * torch.sigmoid(y)


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((left - right).abs().max() / right.abs().max())


def main() -> None:
    torch.manual_seed(0)
    model = Gate(256).eval()
    example = torch.randn(128, 256)
    fast = fusewright.optimize(model, example)
    print(f"is a {type(model).__name__}: {isinstance(fast, Gate)}")
    print(f"shares its parameters: {fast.weight is model.weight}")

    with torch.no_grad():
        print(f"batch of 128, differs by {difference(fast(example), model(example)):.1e}")
        other = torch.randn(7, 256)  # The first dimension is dynamic: the same kernels run.
        print(f"batch of 7, differs by {difference(fast(other), model(other)):.1e}")
        model.weight.mul_(2)  # What changes in the model changes in both.
        print(f"weights changed, differs by {difference(fast(example), model(example)):.1e}")

    copy = Gate(256).eval()
    copy.load_state_dict(fast.state_dict())
    with torch.no_grad():
        print(f"state loaded, differs by {difference(fast(example), copy(example)):.1e}")


if __name__ == "__main__":
    main()
