"""`optimize(check=True)`: kernels that differ from eager are found before the first call."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusewright
from fusewright.compile import check, solution
from fusewright.compile.distance import Limits, by_truth, difference, is_small
from tests.support.models import Lambda

pytestmark = pytest.mark.may_differ

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x)) * 3 + 1


# Text of the kernels, what a bug makes of it, and what the warning names.
BUGS = {
    "forward": ("* 3.0f + 1.0f", "* 3.0f + 1.5f", "output 0"),
    "backward": ("(1.0f - tanh * tanh)", "(1.0f - tanh)", "gradient of"),
    "buffer": ("* 0.9f", "* 0.8f", "buffer norm.running_mean"),
}


def with_bug(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    """Kernels are rendered with another text."""
    prepare = solution.prepare

    def broken(*args: Any, **kwargs: Any) -> Any:
        made = prepare(*args, **kwargs)
        assert right in made.source.text
        return replace(
            made, source=replace(made.source, text=made.source.text.replace(right, wrong))
        )

    monkeypatch.setattr(solution, "prepare", broken)


def trained(model: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    result = model(x)
    result.square().sum().backward()
    assert x.grad is not None
    return [result.detach(), x.grad, *(each.clone() for each in model.buffers())]


@pytest.mark.parametrize("where", BUGS)
def test_a_bug_is_found_and_the_original_forward_runs(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong, named = BUGS[where]
    with_bug(monkeypatch, right, wrong)
    with pytest.warns(RuntimeWarning, match=f"in train mode our kernels differ.*{named}"):
        fast = fusewright.optimize(Normed(), X)
    for ours, eager in zip(trained(fast), trained(Normed()), strict=True):
        assert torch.allclose(ours, eager)
    unchecked = fusewright.optimize(Normed(), X, check=False)
    pairs = zip(trained(unchecked), trained(Normed()), strict=True)
    assert not all(torch.allclose(ours, eager) for ours, eager in pairs)


class Differentiating(nn.Module):
    """Its result has a gradient function wherever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.tanh(self.linear(x))


def test_gradients_that_forward_enables_itself() -> None:
    model, x = Differentiating(), torch.randn(3, 4)
    with pytest.warns(RuntimeWarning, match="eager alone gives the gradient function of output 0"):
        fast = fusewright.optimize(model, x)
    with torch.no_grad():
        y = fast(x)
    assert y.requires_grad
    y.sum().backward()
    assert model.linear.weight.grad is not None


def test_new_shapes_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = fusewright.optimize(Lambda(lambda x: x.exp() + 1), X)
    with_bug(monkeypatch, "+ 1.0f", "+ 2.0f")
    wide = torch.randn(16, 8, 3)
    with pytest.warns(RuntimeWarning, match="differ from eager"):
        assert torch.allclose(fast(wide), wide.exp() + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(fast(wide), wide.exp() + 1)
        assert torch.allclose(fast(X), X.exp() + 1)


def test_kernels_that_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    real = check.call._fw_forward

    def fails(*args: Any) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(check.call, "_fw_forward", fails)
    with pytest.warns(RuntimeWarning, match="RuntimeError: no kernel image"):
        fast = fusewright.optimize(Lambda(torch.sin), X)
    monkeypatch.setattr(check.call, "_fw_forward", real)
    assert torch.equal(fast(X), torch.sin(X))


def keeps_count(module: nn.Module, x: Tensor) -> Tensor:
    module.count = module.count + x.sum()  # type: ignore[assignment]
    return x * module.count


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count: Any = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return keeps_count(self, x)


class Averaging(nn.Module):
    """Returns a buffer that the next call writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.mean.mul_(0.5).add_(x.detach().mean(0) * 0.5)
        return torch.relu(x - self.mean), self.mean


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU()),
    "state": Counting,
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()),
    "argmax": lambda: Lambda(lambda x: (x * 2).argmax(1)),
    "nan": lambda: Lambda(lambda x: torch.log(x) * 2),
    "no gradient": lambda: Lambda(lambda x: x.detach() * 2),
    "float8": lambda: Lambda(lambda x: (x * 2).to(torch.float8_e4m3fn)),
    "a buffer as the result": Averaging,
}


@pytest.mark.parametrize("name", MODELS)
def test_right_kernels_pass_and_nothing_is_disturbed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compared = MODELS[name](), []
    real = check.difference

    def noted(*args: Any) -> str:
        compared.append(sorted(args[0]))
        return real(*args)

    monkeypatch.setattr(check, "difference", noted)
    before = {key: each.clone() for key, each in model.state_dict().items()}
    generator, example = torch.get_rng_state(), X.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = fusewright.optimize(model, X)
    assert compared
    assert torch.equal(torch.get_rng_state(), generator) and torch.equal(X, example)
    assert all(torch.equal(before[key], each) for key, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert fusewright.explain(fast).graphs


def test_gradients_that_are_rounding_alone() -> None:
    """That of a bias before a batch norm, where eager is the float64 run itself."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fusewright.explain(fusewright.optimize(model, X.double())).graphs


class Shared(nn.Module):
    """A part that deepcopy does not copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def __deepcopy__(self, memo: Any) -> Shared:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_part_that_is_not_copied_is_not_touched() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Shared())
    fusewright.optimize(model, X * 10 + 100)
    assert model[2].weight.dtype is torch.float32 and model[2].weight.grad is None


def test_hooks_of_saved_tensors_see_the_users_call_alone() -> None:
    """A checkpoint counts what forward saves, and the call may need new kernels."""
    fast = fusewright.optimize(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), X)
    x = torch.randn(4, 3, 8, requires_grad=True)
    checkpoint(fast, x, use_reentrant=False).square().sum().backward()
    assert x.grad is not None


def test_threads_leave_the_process_as_it_was() -> None:
    filters: list[Any] = list(warnings.filters)
    generator = torch.random.default_generator
    models = [nn.Sequential(nn.Linear(64, 64 + at), nn.ReLU()) for at in range(4)]
    threads = [
        threading.Thread(target=fusewright.optimize, args=(each, torch.randn(64, 64)))
        for each in models
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert list(warnings.filters) == filters
    assert torch.random.default_generator is generator


# Distances --------------------------------------------------------------------------------------

ONE = {"output 0": torch.ones(1000)}


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ({}, "eager alone gives the output 0"),
        ({**ONE, "output 1": torch.ones(1)}, "ours alone gives the output 1"),
        ({"output 0": torch.ones(1, 1000)}, r"float32\[1, 1000\], not"),
        ({"output 0": torch.ones(1000).double()}, "float64"),
        ({"output 0": torch.ones(1000) * 1.02}, "off by 2.0e-02"),
        ({"output 0": torch.ones(1000) * float("nan")}, "off by inf"),
        ({"output 0": torch.ones(1000) * 1.001}, ""),
    ],
)
def test_differences_in_words(ours: dict[str, Tensor], words: str) -> None:
    found = difference(ours, ONE, Limits())
    assert words in found.replace("[", r"\[").replace("]", r"\]") if words else not found


def test_a_float64_run_excuses_errors_that_are_like_eagers() -> None:
    name, truth = "gradient of weight", torch.linspace(-1, 1, 1000, dtype=torch.float64)
    eager, alike, wrong = (truth.float() + by for by in (0.1, -0.2, 2.0))
    excuse = by_truth({name: truth}, Limits())
    assert not difference({name: alike}, {name: eager}, Limits(), excuse)
    assert "off by" in difference({name: wrong}, {name: eager}, Limits(), excuse)


def test_without_a_float64_run_large_differences_count() -> None:
    for name, limit in (("output 0", 0.25), ("gradient of weight", 2.0)):
        eager = {name: torch.ones(100)}
        for times, is_right in ((0.9, True), (1.1, False)):
            ours = {name: torch.ones(100) * (1 + limit * times)}
            assert (not difference(ours, eager, Limits(), is_small)) is is_right


def test_few_integers_may_differ() -> None:
    eager = {"output 0": torch.arange(100)}
    few, many = (torch.arange(100).clone() for _ in range(2))
    few[:5], many[:20] = 0, 0
    assert not difference({"output 0": few}, eager, Limits())
    assert difference({"output 0": many}, eager, Limits())
