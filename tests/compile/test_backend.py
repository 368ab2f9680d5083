"""`torch.compile(model, backend="fusewright")`: each call agrees with eager."""

from __future__ import annotations

import copy
import importlib.metadata
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.compile import backend as module
from fusewright.compile.backend import backend
from tests.support.models import Lambda


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the graphs that were compiled."""
    kinds: list[str] = []
    real = module._compiled

    def counted(kind: str, *rest: Any) -> Any:
        kinds.append(kind)
        return real(kind, *rest)

    monkeypatch.setattr(module, "_compiled", counted)
    return kinds


def compiled(model: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, **settings)


def results(model: nn.Module, run: Callable[..., Any], *args: Tensor) -> list[Any]:
    """Outputs, gradients of arguments and parameters, and buffers, of one training step."""
    given = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in args]
    model.zero_grad()
    found = run(*given)
    outputs = found if isinstance(found, tuple) else (found,)
    torch.stack([each.sin().sum() for each in outputs if each.requires_grad]).sum().backward()
    gradients = [each.grad for each in (*given, *model.parameters())]
    return [*(each.detach() for each in outputs), *gradients, *model.buffers()]


def agrees(model: nn.Module, *args: Tensor, **settings: Any) -> None:
    """A training step, and a call without gradients in evaluation, with no warning."""
    ours = copy.deepcopy(model)
    fast = compiled(ours, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = results(ours, fast, *args)
        torch.testing.assert_close(found, results(model, model, *args), atol=2e-5, rtol=2e-5)
        with torch.no_grad():
            found = fast.eval()(*args)  # type: ignore[attr-defined]
            torch.testing.assert_close(found, model.eval()(*args), atol=2e-5, rtol=2e-5)


def test_a_network_with_batch_norm_and_pooling() -> None:
    features = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*features, nn.Flatten(), nn.Linear(8 * 7 * 7, 10), nn.LayerNorm(10))
    agrees(model, torch.randn(4, 3, 16, 16))


def test_all_of_a_pointwise_chain_is_one_kernel(built: list[str]) -> None:
    fast = compiled(lambda x: torch.relu(x * 2 + 1).sigmoid())
    x = torch.randn(8, 16)
    torch.testing.assert_close(fast(x), torch.relu(x * 2 + 1).sigmoid())
    assert built == ["inference"]


def test_the_name_is_found_after_installation() -> None:
    group = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if "fusewright" not in group.names:
        pytest.skip("fusewright is not installed in this Python")
    fast = torch.compile(lambda x: torch.relu(x) + 1, backend="fusewright")
    x = torch.randn(5)
    torch.testing.assert_close(fast(x), torch.relu(x) + 1)


class Attention(nn.Module):
    """Its sizes are sums and products of the length of its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.relu(self.linear(x)))
        scores = torch.softmax(y @ y.transpose(1, 2), -1)
        return torch.cat([scores @ y, y[:, :-1]], 1).mean(1)


def test_fifteen_lengths_need_two_builds(built: list[str]) -> None:
    model = Attention()
    fast = compiled(model)
    for length in range(2, 17):
        x = torch.randn(3, length, 16)
        torch.testing.assert_close(
            results(model, fast, x), results(model, model, x), atol=2e-5, rtol=2e-5
        )
    assert built == ["forward", "backward"] * 2


@pytest.mark.parametrize("dynamic", [True, False])
def test_sizes_and_numbers_as_arguments(dynamic: bool) -> None:
    def model(x: Tensor, n: int) -> tuple[Tensor, Tensor, int]:
        y = torch.cat([x, x[:, :1]], 1) * n
        return y.softmax(1), y.sum(0), x.shape[1] + n

    fast = compiled(model, dynamic=dynamic)
    for rows, columns, n in ((5, 7, 3), (9, 11, 4), (3, 4, 2), (1, 1, 1)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(fast(x, n), model(x, n))


SHAPES: dict[str, tuple[Callable[[Tensor], Any], tuple[tuple[int, ...], ...]]] = {
    "matmul": (lambda x: (x @ x.t()).softmax(0), ((3, 4), (9, 2))),
    "reshape": (lambda x: x.reshape(x.shape[0] * x.shape[1], -1).mean(0), ((3, 4, 5), (2, 9, 8))),
    "normalize": (lambda x: (x - x.mean((0, 1))) / x.var(), ((3, 4), (6, 10))),
    "pad": (lambda x: F.pad(x, (1, 2)) * 2, ((3, 4), (6, 7))),
    "chunk": (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1).tanh(), ((3, 4), (6, 10))),
    "roll": (lambda x: x.roll(1, 0) - x.flip(0), ((3, 4), (6, 10))),
    "arange": (
        lambda x: x * torch.arange(x.shape[1]) + x.new_ones(x.shape[0], 1),
        ((3, 4), (6, 9)),
    ),
    "tril": (lambda x: torch.tril(x @ x.t()).softmax(-1), ((3, 4), (6, 10))),
    "pool": (lambda x: F.max_pool2d(x.relu(), 2), ((2, 2, 8, 8), (3, 2, 9, 11))),
    "interpolate": (
        lambda x: F.interpolate(x, scale_factor=2).relu(),
        ((2, 2, 4, 4), (3, 2, 5, 6)),
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True) * 2,
        ((2, 2, 3, 4), (3, 2, 6, 4)),
    ),
    "empty": (lambda x: torch.relu(x).sum(0), ((4, 3), (0, 3), (1, 3))),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_size_may_be_symbolic(name: str) -> None:
    function, shapes = SHAPES[name]
    model = Lambda(function)
    fast = compiled(model, dynamic=True)
    for shape in shapes:
        x = torch.randn(shape)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            found = results(model, fast, x)
        torch.testing.assert_close(found, results(model, model, x), atol=2e-5, rtol=2e-5)


def test_a_size_that_is_a_quotient() -> None:
    def model(x: Tensor) -> Tensor:
        half = x.shape[0] // 2
        return torch.cat([x[:half].relu(), x[half:].tanh()]) * half

    fast = compiled(model, dynamic=True)
    for rows in (8, 9, 3):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(fast(x), model(x))


def test_a_size_that_is_rounded_up() -> None:
    """As attention on a GPU pads its rows."""

    class Padded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            whole = 32 * math.ceil(x.shape[0] / 32)
            return F.pad(x.sigmoid(), (0, 0, 0, whole - x.shape[0])) * 2

    for rows in (5, 33, 64):
        agrees(Padded(), torch.randn(rows, 7), dynamic=True)


def test_tensors_that_forward_makes_are_constants() -> None:
    table = torch.randn(6000)

    def model(x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0]).sum() + table[: x.shape[0]]

    x = torch.randn(6000)
    torch.testing.assert_close(compiled(model)(x), model(x))


def test_changes_in_place_and_views_are_as_in_eager() -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.mul_(2).add_(y)
        return x, x[0], (y * 3).t()

    fast = compiled(model)
    given, expected = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3)
    y = torch.ones(2, 3)
    found, wanted = fast(given, y), model(expected, y)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(given, expected)
    assert found[0] is given and found[1].data_ptr() == given.data_ptr()
    assert found[2].stride() == wanted[2].stride()


def test_random_numbers_are_those_of_eager() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU())
    fast = compiled(model)
    x = torch.randn(16, 8)
    torch.manual_seed(3)
    found = results(model, fast, x)
    torch.manual_seed(3)
    torch.testing.assert_close(found, results(model, model, x))


def test_a_gradient_in_another_layout() -> None:
    """Backward's kernels are written for contiguous gradients."""
    model = Lambda(lambda x: torch.tanh(x) * 2)
    fast = compiled(model)
    x, tangent = torch.randn(4, 6, requires_grad=True), torch.randn(6, 4).t()
    (found,) = torch.autograd.grad(fast(x), x, tangent)
    (wanted,) = torch.autograd.grad(model(x), x, tangent)
    torch.testing.assert_close(found, wanted)


def test_lazily_negated_views() -> None:
    """Their memory holds the values with the other sign, and kernels read memory."""
    compiled = torch.compile(torch.sin, backend=backend)
    plain = torch.linspace(-1, 1, 10)
    negated = torch._neg_view(plain)
    assert negated.is_neg()
    for x in (plain, negated, plain):
        for tangent in (plain, negated):
            given = x.detach().requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                result = compiled(given)
            assert torch.equal(result, torch.sin(x))
            (gradient,) = torch.autograd.grad(result, given, tangent)
            torch.testing.assert_close(gradient, torch.cos(x) * tangent)


def test_a_graph_that_cannot_be_written_is_run_by_pytorch() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    x = torch.randn(5)
    with pytest.warns(RuntimeWarning, match="PyTorch runs this inference graph"):
        found = compiled(model, fullgraph=True)(x)
    torch.testing.assert_close(found, model(x))


def test_a_break_in_the_graph() -> None:
    seen: list[float] = []

    def model(x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        seen.append(float(y.sum()))
        return y + len(seen)

    fast = compiled(model)
    x = torch.randn(5)
    torch.testing.assert_close(fast(x), torch.relu(x) * 2 + 1)
    torch.testing.assert_close(fast(x), torch.relu(x) * 2 + 2)


def test_python_state_that_changes_is_guarded() -> None:
    settings = {"scale": 2.0}
    fast = compiled(Lambda(lambda x: torch.relu(x) * settings["scale"]))
    x = torch.randn(5)
    torch.testing.assert_close(fast(x), torch.relu(x) * 2)
    settings["scale"] = 7.0
    torch.testing.assert_close(fast(x), torch.relu(x) * 7)


@pytest.mark.parametrize("settings", [{"mode": "max-overhead"}, {"options": {"fast": True}}])
def test_unknown_settings_are_errors_that_name_the_known_ones(settings: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="the back-end fusewright has no"):
        compiled(lambda x: x + 1, **settings)(torch.randn(3))


def test_attention_with_a_learned_key_at_any_size() -> None:
    """The gradient of the keys is viewed by sizes of which it is not known that they fit."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=6, vdim=5, batch_first=True)
    fast = torch.compile(model, backend="fusewright", dynamic=True)
    for batch in (2, 3):
        given = torch.randn(batch, 4, 8), torch.randn(batch, 3, 6), torch.randn(batch, 3, 5)
        sums = [each(*given)[0].square().sum() for each in (fast, model)]
        mine, theirs = (torch.autograd.grad(each, list(model.parameters())) for each in sums)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
