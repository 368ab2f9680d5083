"""Recurrent layers on a GPU: cuDNN's kernels, with fused loops around them, as exact as eager."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.compile.solution import solve
from fusewright.emit.file import file_text
from fusewright.problem.load import load_problem
from tests.support.recurrent import LSTM_PROBLEM, RecurrentModel, outputs_and_gradients

LAYERS: dict[str, tuple[nn.RNNBase, tuple[int, ...]]] = {
    "lstm": (nn.LSTM(48, 64, 2), (64, 8, 48)),
    "lstm, projected": (nn.LSTM(48, 64, proj_size=32, batch_first=True), (8, 64, 48)),
    "gru both ways": (nn.GRU(48, 64, bidirectional=True, batch_first=True), (8, 64, 48)),
    "gru without biases": (nn.GRU(48, 64, 2, bias=False, batch_first=True), (8, 64, 48)),
    "tanh": (nn.RNN(48, 64, batch_first=True), (8, 64, 48)),
    "relu": (nn.RNN(48, 64, 2, nonlinearity="relu"), (64, 8, 48)),
}


@pytest.fixture(autouse=True)
def exactly() -> Iterator[None]:
    """Compute in float32. Warnings about the original forward or scattered weights are errors."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*original forward.*")
        warnings.filterwarnings("error", message=".*single contiguous chunk.*")
        yield
    torch.backends.cudnn.allow_tf32 = before


def assert_close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for m, t in zip(mine, theirs, strict=True):
        assert m.shape == t.shape and m.dtype is t.dtype
        assert float((m - t).norm()) <= 1e-5 * float(t.norm())


def pair(layer: nn.RNNBase, x: Tensor) -> tuple[nn.Module, nn.Module]:
    model = RecurrentModel(layer).cuda()
    return model, fusewright.optimize(model, x)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_give_what_eager_gives(name: str) -> None:
    layer, shape = LAYERS[name]
    x = torch.randn(shape, device="cuda")
    model, fast = pair(layer, x)
    for size in (shape[0], shape[0] + 5):  # another batch, or more steps
        other = torch.randn(size, *shape[1:], device="cuda")
        model.train()
        fast.train()
        assert_close(outputs_and_gradients(fast, other), outputs_and_gradients(model, other))
        model.eval()
        fast.eval()
        with torch.no_grad():
            assert_close(list(fast(other)), list(model(other)))
    assert len(fast.__dict__["_fw_engine"].modes) <= 4  # with and without our matmuls


def test_evaluation_mode_has_gradients() -> None:
    """cuDNN, and so eager, refuses them. Ours are those of training."""
    x = torch.randn(8, 64, 48, device="cuda")
    model, fast = pair(nn.LSTM(48, 64, 2, batch_first=True), x)
    wanted = outputs_and_gradients(model.train(), x)
    assert_close(outputs_and_gradients(fast.eval(), x), wanted)


def test_dropout_draws_what_cudnn_draws() -> None:
    x = torch.randn(8, 64, 48, device="cuda")
    model, fast = pair(nn.LSTM(48, 64, 2, dropout=0.5, batch_first=True), x)
    assert_close(outputs_and_gradients(fast, x), outputs_and_gradients(model, x))
    assert not torch.equal(fast(x)[0], fast(x)[0])


def test_a_second_backward_repeats_the_first() -> None:
    x = torch.randn(8, 64, 48, device="cuda")
    _, fast = pair(nn.GRU(48, 64, 2, batch_first=True), x)
    y = fast(x)[0]
    parameters = list(fast.parameters())
    first = torch.autograd.grad(y.sum(), parameters, retain_graph=True)
    assert_close(list(torch.autograd.grad(y.sum(), parameters)), list(first))


def test_autocast_gives_16_bits() -> None:
    x = torch.randn(8, 64, 48, device="cuda")
    model = RecurrentModel(nn.LSTM(48, 64, batch_first=True)).cuda()
    with torch.autocast("cuda", torch.float16):
        fast = fusewright.optimize(model, x)
        mine, theirs = outputs_and_gradients(fast, x), outputs_and_gradients(model, x)
    for m, t in zip(mine, theirs, strict=True):
        assert m.dtype is t.dtype
        assert float((m - t).float().norm()) <= 1e-2 * float(t.float().norm())


def test_training_can_be_captured_in_a_cuda_graph() -> None:
    x = torch.randn(8, 64, 48, device="cuda")
    model, fast = pair(nn.LSTM(48, 64, 2, batch_first=True), x)
    parameters = list(fast.parameters())

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(fast(x)[0].square().sum(), parameters)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    wanted = torch.autograd.grad(model(x)[0].square().sum(), parameters)
    assert_close(list(made), list(wanted))


def test_memory_is_freed_with_the_results() -> None:
    x = torch.randn(8, 64, 48, device="cuda")
    _, fast = pair(nn.LSTM(48, 64, 2, batch_first=True), x)
    held = []
    for _ in range(12):
        torch.autograd.grad(fast(x)[0].sum(), list(fast.parameters()))
        time.sleep(0.02)  # the thread that ran a backward lets go of it a moment later
        held.append(torch.cuda.memory_allocated())
    assert min(held[8:]) <= min(held[1:5])


def test_the_emitted_file_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "problem.py"
    path.write_text(LSTM_PROBLEM)
    problem = load_problem(path)
    args: Any = tuple(each.cuda() for each in problem.make_inputs())
    text = file_text(solve(problem.make_model().cuda(), args).bundle, problem.source, "")
    names: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(text, "<emitted>", "exec"), names)
    eager, fast = names["Model"]().cuda(), names["ModelNew"]().cuda()
    fast.load_state_dict(eager.state_dict())
    for x in (args[0], torch.randn(5, 36, 3, device="cuda")):
        assert_close(outputs_and_gradients(fast, x), outputs_and_gradients(eager, x))
