"""Reflected, replicated and circular padding: as loops, in convolutions, as PyTorch calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture, pads
from fusewright.compile import pipeline
from fusewright.compile.pipeline import prepare
from fusewright.errors import CaptureError
from fusewright.plan.steps import Call
from fusewright.target.target import Target
from tests.support.emulated_modules import use_tensor_cores
from tests.support.models import PADDING_MODES, Padded


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(pads, "LOOPS", ("cpu",))


def calls(model: nn.Module, x: Tensor, mode: str = "train") -> set[str]:
    program = capture(model, (x,), mode=mode)
    graphs = [program.inference, *([program.backward] if program.backward else [])]
    ops = {node.op for graph in graphs for node in graph.nodes if "_pad" in node.op}
    return ops - {"aten.constant_pad_nd.default"}


@pytest.mark.sample(3)
@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize(
    ("shape", "padding"),
    [
        ((2, 3, 4, 5), (1, 1, 1, 1)),
        ((2, 3, 4, 5), (0, 1, 1, 0)),
        ((2, 3, 4, 5), (0, 0, 1, 1)),
        ((2, 3, 6), (2, 1)),
        ((3, 6), (1, 2)),
        ((2, 1, 4, 2), (1, 0, 1, 1)),
    ],
)
def test_values_and_gradients(shape: tuple[int, ...], padding: tuple[int, ...], mode: str) -> None:
    torch.manual_seed(1)
    model, x = Padded(padding, mode), torch.randn(shape)
    x.view(-1)[:3] = torch.tensor([-0.0, float("nan"), float("inf")])
    if mode == "replicate" and max(padding) > 1:  # sums at an edge stay PyTorch's
        assert calls(model, x) == {"aten.replication_pad1d_backward.default"}
    else:
        assert not calls(model, x)
    fast = fusewright.optimize(model, (x,))
    ours, eager = (x.clone().requires_grad_() for _ in range(2))
    made, expected = fast(ours), model(eager)
    assert torch.equal(made.view(torch.int32), expected.view(torch.int32))
    assert made.stride() == expected.stride()
    grad_output = torch.randn_like(expected)
    made.backward(grad_output)
    expected.backward(grad_output)
    assert ours.grad is not None and eager.grad is not None
    torch.testing.assert_close(ours.grad, eager.grad)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", PADDING_MODES)
def test_results_are_row_major(mode: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; on the host only circular ones are, so that a real call would differ."""
    monkeypatch.setattr(pads, "LOOPS", (where,))
    monkeypatch.setattr(pipeline, "witness", lambda *_: None)
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    model = Padded((1, 1, 1, 1), mode)
    made = fusewright.optimize(model, (x,), modes=("eval",))(x)
    assert torch.equal(made, model(x))
    assert made.is_contiguous() == (where == "cpu" or mode == "circular")


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(
    ("shape", "padding"),
    [((2, 3, 9, 9), (3, 3, 3, 3)), ((1, 2, 4, 4, 4), (1, 1, 1, 1, 1, 1)), ((3, 9), (5, 5))],
)
def test_many_pieces_stay_pytorchs(shape: tuple[int, ...], padding: tuple[int, ...]) -> None:
    model, x = Padded(padding, "reflect"), torch.randn(shape)
    assert len(calls(model, x, "eval")) == 2
    torch.testing.assert_close(fusewright.optimize(model, (x,))(x), model(x))


@pytest.mark.parametrize("padding", [(1, 1, 1, 1), (0, 0, 2, 3), (-1, 1, 0, 0), (8, 8, 0, 0)])
def test_circular_padding_on_the_host_is_a_concatenation(padding: tuple[int, ...]) -> None:
    model, x = Padded(padding, "circular"), torch.randn(2, 3, 6, 8)
    ours, eager = (x.clone().requires_grad_() for _ in range(2))
    made, expected = fusewright.optimize(model, (x,))(ours), model(eager)
    assert torch.equal(made, expected)
    (made.cos().sum() + expected.cos().sum()).backward()
    torch.testing.assert_close(ours.grad, eager.grad)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_padding_that_pytorch_refuses_is_refused(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pads, "LOOPS", (where,))
    for mode, padding, why in (
        ("circular", (9, 1, 1, 1), "wrapping around more than once"),
        ("reflect", (8, 1, 1, 1), "Padding size should be less"),
    ):
        with pytest.raises(CaptureError, match=why):
            capture(Padded(padding, mode), (torch.randn(2, 3, 6, 8),), mode="eval")


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("mode", PADDING_MODES)
def test_convolutions_of_padded_images(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to PyTorch. (Inside the convolution, the nine pieces are slower.)"""
    use_tensor_cores(monkeypatch)
    layer = nn.Conv2d(64, 64, 3, padding=1, padding_mode=mode)
    x, device = torch.randn(16, 64, 56, 56), torch.device("cpu")
    found = prepare(layer, (x,), modes=("train",), device=device, target=Target.cuda()).modes[0]
    assert [step.kind for step in found.inference.steps] == ["loop", "convolution"]
    assert [step.kind for step in found.forward.steps] == ["loop", "convolution"]
    assert found.backward is not None
    assert not any(isinstance(step, Call) for step in found.backward.steps)
