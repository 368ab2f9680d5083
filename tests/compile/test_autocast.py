"""Autocast around forward, around a part of it and around backward alone, beside eager mode.

Programs have autocast's conversions as steps, so autocast is off while they run: else PyTorch's
calls would convert once more, and kernels would read the memory of 16-bit results as 32-bit ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import Tensor, nn

import fusewright
from tests.support.emitted_files import emitted

Door = Callable[[nn.Module, Tensor], nn.Module]


def by_optimize(model: nn.Module, x: Tensor) -> nn.Module:
    return fusewright.optimize(model, x, modes=("train",))


def by_torch_compile(model: nn.Module, x: Tensor) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend="fusewright")  # type: ignore[return-value]


def inside_torch_compile(model: nn.Module, x: Tensor) -> nn.Module:
    torch._dynamo.reset()
    fast = by_optimize(model, x)
    return torch.compile(fast, backend="eager")  # type: ignore[return-value]


DOORS = [by_optimize, by_torch_compile, inside_torch_compile]


class Mixed(nn.Module):
    """Forward disables autocast for its last layers, as losses and routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.body(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(torch.sin(y.float())), y


def gradients(model: nn.Module, results: tuple[Tensor, ...], x: Tensor) -> list[Tensor]:
    wanted = [x, *model.parameters()]
    return list(torch.autograd.grad(sum(each.float().square().sum() for each in results), wanted))


@pytest.mark.parametrize("door", DOORS)
def test_backward_alone_under_autocast(door: Door) -> None:
    """Ours has the digits of a backward without autocast; eager's has those of bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    x = torch.randn(7, 16, requires_grad=True)
    fast = door(model, x)
    expected = gradients(model, (model(x),), x)
    results = (fast(x),)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model, results, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("door", DOORS)
def test_a_part_that_disables_autocast_has_all_digits(door: Door) -> None:
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(7, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        fast = door(model, x)
        expected, found = model(x), fast(x)
    assert [each.dtype for each in found] == [torch.float32, torch.bfloat16]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    head = list(model.head.parameters())
    theirs, mine = (torch.autograd.grad(each[0].square().sum(), head) for each in (expected, found))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("disabled", [False, True])
def test_a_recurrent_layer_computes_in_the_dtype_of_its_place(disabled: bool) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=not disabled):
                made: Tensor = self.layer(x)[0]
            return made * 2

    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(2, 9, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        fast = by_optimize(model, x)
        expected, found = model(x), fast(x)
    assert found.dtype is expected.dtype
    digits = 1e-6 if disabled else 1e-2
    torch.testing.assert_close(found, expected, rtol=digits, atol=digits)
    theirs, mine = (gradients(model, (each,), x) for each in (expected, found))
    torch.testing.assert_close(mine, theirs, rtol=digits, atol=4 * digits)


def test_an_emitted_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = """
        import torch
        from torch import nn

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

            def forward(self, x):
                return self.second(torch.tanh(self.first(x)))

        def get_inputs():
            return [torch.randn(7, 16)]

        def get_init_inputs():
            return []
    """
    _, names, (x,) = emitted(dedent(problem), tmp_path, monkeypatch)
    model, fast = names["Model"](), names["ModelNew"]()
    fast.load_state_dict(model.state_dict())
    x.requires_grad_()
    results = (fast(x),)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(fast, results, x)
    expected = gradients(model, (model(x),), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
