"""Tensors of other layouts than strided. In a process of its own: a wrong step aborts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import warnings
import torch
from torch import Tensor, nn
import fusewright

warnings.filterwarnings("ignore", message=".*beta state.*")
torch.manual_seed(0)
X, EYE = torch.randn(4, 5), torch.eye(4)


class Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(a @ b)


class Holder(nn.Module):
    def __init__(self, held: Tensor, registered: bool) -> None:
        super().__init__()
        if registered:
            self.register_buffer("held", held)
        else:
            self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.held @ x)


class Inside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.t()).{}().to_dense() * 2


def check(model, fast, *args):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        found = fast(*args), fast(*args)
    assert all(torch.equal(each, model(*args)) for each in found)
    return [str(each.message) for each in told if each.category is RuntimeWarning]
"""
_CASES = {
    "example": """
fast = fusewright.optimize(Product(), (sparse, X))
told = check(Product(), fast, sparse, X)
assert len(told) == 1 and "argument 0 is torch.sparse_" in told[0], told
assert check(Product(), fast, EYE, X) == []  # kernels of its own
""",
    "call": """
fast = fusewright.optimize(Product(), (EYE, X))
assert check(Product(), fast, EYE, X) == []
told = check(Product(), fast, sparse, X)
assert len(told) == 1 and "argument 0 is torch.sparse_" in told[0], told
assert check(Product(), fast, EYE, X) == []
""",
    "buffer": """
model = Holder(sparse, True)
told = check(model, fusewright.optimize(model, (X,)), X)
assert len(told) == 1 and "held is torch.sparse_" in told[0], told
""",
    "attribute": """
model = Holder(sparse, False)
told = check(model, fusewright.optimize(model, (X,)), X)
assert len(told) == 1 and "held is torch.sparse_" in told[0], told
""",
    "inside": """
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always", RuntimeWarning)
    fast = fusewright.optimize(Inside(), (X,))
(words,) = [str(each.message) for each in told if each.category is RuntimeWarning]
assert "makes a tensor of layout torch.sparse_" in words and "<string>" not in words, words
assert check(Inside(), fast, X) == []
x = X.clone().requires_grad_()
fast(x).sum().backward()
assert x.grad is not None and bool(x.grad.any())
""",
    "torch.compile": """
scale = 2.0


class Scaled(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(a @ b) * scale


fast = fusewright.optimize(Scaled(), (EYE, X))
told = check(Scaled(), fast, sparse, X)
assert len(told) == 1 and "argument 0 is torch.sparse_" in told[0], told
""",
}


@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_sparse_csc"])
def test_the_original_forward_runs(layout: str) -> None:
    warned = "from fusewright.runtime import call\ncall._FW_WARNED.clear()\n"
    script = f"{_SCRIPT.format(layout)}\nsparse = EYE.{layout}()\n"
    script += "".join(f"{warned}{each}" for each in _CASES.values())
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
