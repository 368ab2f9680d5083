"""Recurrent layers: few steps are unrolled, many stay one PyTorch call, with gradients."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusewright
from fusewright.capture import capture, recurrent
from fusewright.compile.pipeline import prepare
from fusewright.compile.solution import solve
from fusewright.emit.file import file_text
from fusewright.errors import CaptureError
from fusewright.ir.interpret import interpret
from fusewright.plan.show import show
from fusewright.plan.steps import Call
from fusewright.problem.load import load_problem
from fusewright.runtime.recurrent import _fw_recurrent, _fw_recurrent_backward
from fusewright.verify.verify import verify
from tests.support.emitted_files import emitted
from tests.support.recurrent import LSTM_PROBLEM, RecurrentModel, outputs_and_gradients

STEPS = 36


def assert_same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for m, t in zip(mine, theirs, strict=True):
        torch.testing.assert_close(m, t, rtol=1e-4, atol=1e-4 * float(t.detach().abs().max()))


LAYERS: dict[str, tuple[nn.RNNBase, tuple[int, ...]]] = {
    "lstm": (nn.LSTM(3, 4, 2), (STEPS, 2, 3)),
    "lstm both ways, projected": (
        nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True, batch_first=True), (2, STEPS, 3)
    ),
    "gru both ways": (nn.GRU(3, 4, 2, bidirectional=True, batch_first=True), (2, STEPS, 3)),
    "gru without biases": (nn.GRU(3, 4, bias=False), (STEPS, 2, 3)),
    "tanh": (nn.RNN(3, 4, batch_first=True), (2, STEPS, 3)),
    "relu": (nn.RNN(3, 4, 2, nonlinearity="relu"), (STEPS, 2, 3)),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("error:.*original forward.*")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_many_steps_stays_a_pytorch_call_with_all_gradients(name: str) -> None:
    layer, shape = LAYERS[name]
    model, x = RecurrentModel(layer), torch.randn(shape)
    fast = fusewright.optimize(model, x)
    for training in (True, False):
        model.train(training)
        fast.train(training)
        for size in (shape[0], shape[0] + 3):  # the batch, or the steps
            other = torch.randn(size, *shape[1:])
            assert_same(outputs_and_gradients(fast, other), outputs_and_gradients(model, other))
            with torch.no_grad():
                assert_same(list(fast(other)), list(model(other)))
    assert len(fast.__dict__["_fw_engine"].modes) == 2


def test_first_states_have_gradients() -> None:
    model = RecurrentModel(nn.LSTM(3, 4, 2, batch_first=True))
    args = (torch.randn(2, STEPS, 3), torch.randn(2, 2, 4), torch.randn(2, 2, 4))
    fast = fusewright.optimize(model, args, modes=("train",))
    assert_same(outputs_and_gradients(fast, *args), outputs_and_gradients(model, *args))


def test_inputs_of_other_layouts_and_types() -> None:
    model = RecurrentModel(nn.LSTM(3, 4, batch_first=True))
    turned = torch.randn(STEPS, 5, 3).transpose(0, 1)
    fast = fusewright.optimize(model, turned, modes=("train",))
    assert_same(outputs_and_gradients(fast, turned), outputs_and_gradients(model, turned))
    model, single = model.double(), torch.randn(STEPS, 3).double()
    fast = fusewright.optimize(model, single, modes=("train",))
    assert_same(outputs_and_gradients(fast, single), outputs_and_gradients(model, single))


def test_the_dtype_under_autocast_is_found() -> None:
    """A plain RNN returns bfloat16 on the host, a GRU float32."""
    for layer in (nn.RNN(3, 4), nn.GRU(3, 4)):
        model, x = RecurrentModel(layer).eval(), torch.randn(STEPS, 2, 3)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            fast = fusewright.optimize(model, x, modes=("eval",))
            for mine, theirs in zip(fast(x), model(x), strict=True):
                assert mine.dtype is theirs.dtype
                torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_dropout_is_drawn_as_eager_draws_it() -> None:
    model, x = (
        RecurrentModel(nn.LSTM(3, 4, 2, dropout=0.5, batch_first=True)),
        torch.randn(2, STEPS, 3),
    )
    fast = fusewright.optimize(model, x, modes=("train",))
    assert_same(outputs_and_gradients(fast, x), outputs_and_gradients(model, x))
    first, second = fast(x)[0], fast(x)[0]
    assert not torch.equal(first, second)
    program = capture(model, (x,), mode="train")
    assert [node.op for node in program.forward.nodes if node.random] == ["torch.lstm"]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        made = fast(x.clone().requires_grad_())[0]
    with pytest.raises(RuntimeError, match="drops values at random"):
        made.sum().backward()


def test_backward_without_saved_state_runs_the_layer_again() -> None:
    model, x = RecurrentModel(nn.GRU(3, 4, batch_first=True)), torch.randn(2, STEPS, 3)
    fast = fusewright.optimize(model, x, modes=("train",))
    wanted = torch.autograd.grad(model(x)[0].sum(), list(model.parameters()))
    again = checkpoint(fast, x.clone().requires_grad_(), use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        packed = fast(x)
    for made, times in ((again, 1), (packed, 2), (fast(x), 2)):
        for _ in range(times):
            found = torch.autograd.grad(
                made[0].sum(), list(fast.parameters()), retain_graph=times > 1
            )
            assert_same(list(found), list(wanted))


def test_frozen_weights_have_no_gradient() -> None:
    model, x = RecurrentModel(nn.GRU(3, 4, batch_first=True)), torch.randn(2, STEPS, 3)
    fast = fusewright.optimize(model, x, modes=("train",))
    model.layer.requires_grad_(False)  # the parameters are shared
    fast(x)[1].sum().backward()
    assert all(each.grad is None for each in model.layer.parameters())
    (wanted,) = torch.autograd.grad(model(x)[1].sum(), [model.scale])
    torch.testing.assert_close(model.scale.grad, wanted)


def test_torch_compile_runs_the_original() -> None:
    model, x = RecurrentModel(nn.GRU(3, 4, batch_first=True)), torch.randn(2, STEPS, 3)
    fast = fusewright.optimize(model, x, modes=("train",))
    assert_same(
        outputs_and_gradients(torch.compile(fast, backend="eager"), x),
        outputs_and_gradients(model, x),
    )  # type: ignore[arg-type]


def test_the_interpreter_runs_recurrent_layers() -> None:
    model, x = RecurrentModel(nn.LSTM(3, 4, batch_first=True)), torch.randn(2, STEPS, 3)
    program = capture(model, (x,), mode="train")
    assert program.backward is not None
    held = dict(model.named_parameters())
    given = [x if each.kind == "input" else held[each.path] for each in program.bindings]
    made = interpret(program.forward, [each.detach() for each in given], program.example_sizes)
    exact = RecurrentModel(nn.LSTM(3, 4, batch_first=True)).double()
    exact.load_state_dict(model.state_dict())
    assert_same([each.detach() for each in made[:3]], list(exact(x.double())))
    saved = made[len(program.results) - sum(r.kind == "saved" for r in program.results) :]
    tangents = [torch.ones_like(made[at]) for at in program.tangents]
    found = interpret(program.backward, [*saved, *tangents], program.example_sizes)
    wanted = torch.autograd.grad(sum(e.sum() for e in exact(x.double())), exact.parameters())  # type: ignore[arg-type]
    by_path = {b.path: g for b, g in zip(program.bindings, found, strict=True)}
    names = [name for name, _ in exact.named_parameters()]
    assert_same([by_path[name] for name in names], list(wanted))


def test_packed_sequences_run() -> None:
    """Capture cannot trace how they are packed; the compiled module still runs them."""
    layer = nn.GRU(3, 4)
    lengths = torch.tensor([STEPS, STEPS - 5])
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(STEPS, 2, 3), lengths)
    weights, first = [each.detach() for each in layer.parameters()], torch.zeros(1, 2, 4)
    call = ("gru", packed.data, packed.batch_sizes, [first], weights)
    how = (True, 1, 0.0, True, False, False, torch.float32)
    y, last, tape = _fw_recurrent(True, *call, *how)
    wanted = layer(packed)
    assert torch.equal(y, wanted[0].data) and torch.equal(last, wanted[1])
    changes = [torch.ones_like(y), None]
    found = _fw_recurrent_backward([False, False] + [True] * 4, changes, tape, *call, *how)
    assert found[:2] == [None, None]
    theirs = torch.autograd.grad(wanted[0].data.sum(), layer.parameters())
    assert_same(found[2:], list(theirs))  # type: ignore[arg-type]


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([50, 40])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=True)
        return self.layer(packed)[1]  # type: ignore[no-any-return]


def test_packing_inside_a_model_is_an_error() -> None:
    with pytest.raises(CaptureError, match=r"self\.layer"):
        capture(Packed(), (torch.randn(50, 2, 3),), mode="eval")


def test_the_plan_says_that_the_layer_stays() -> None:
    model, x = RecurrentModel(nn.LSTM(3, 4, 2, batch_first=True)), torch.randn(2, STEPS, 3)
    (mode,) = prepare(model, (x,), modes=("train",), device=x.device).modes
    text = show(mode)
    assert text.count("call   torch.lstm: PyTorch's recurrent layer") == 2
    assert text.count("call   torch.lstm_backward: PyTorch's recurrent layer") == 1
    (call,) = (step for step in mode.inference.steps if isinstance(step, Call))
    matrices = sum(each.numel() for each in model.layer.parameters() if each.dim() == 2)
    assert call.operations == 2 * matrices * 2 * STEPS


def test_the_emitted_file_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, names, args = emitted(LSTM_PROBLEM, tmp_path, monkeypatch)
    assert "_fw_recurrent_backward(" in text
    assert re.search(r"pass|\btry\b|\bexcept\b", text) is None
    eager, fast = names["Model"](), names["ModelNew"]()
    fast.load_state_dict(eager.state_dict())
    for training in (True, False):
        eager.train(training)
        fast.train(training)
        for x in (args[0], torch.randn(5, 36, 3)):
            assert_same(outputs_and_gradients(fast, x), outputs_and_gradients(eager, x))


def test_files_without_recurrent_layers_have_no_code_for_them() -> None:
    model, x = nn.Sequential(nn.Tanh()), torch.randn(2, 3)
    assert "_fw_recurrent" not in file_text(solve(model, (x,)).bundle, "class Model: ...\n", "")


def test_verify_accepts_a_recurrent_model(tmp_path: Path) -> None:
    path = tmp_path / "problem.py"
    path.write_text(LSTM_PROBLEM)
    problem = load_problem(path)
    args: Any = problem.make_inputs()
    report = verify(problem, lambda: fusewright.optimize(problem.make_model(), args), device="cpu")
    assert report.ok, [each.name for each in report.checks if not each.ok]


def test_few_steps_are_unrolled() -> None:
    program = capture(nn.GRU(3, 4, batch_first=True), (torch.randn(2, 4, 3),), mode="train")
    assert not any(node.layer for node in program.forward.nodes)


def test_weights_of_recurrent_layers_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, PyTorch would copy them into one buffer, which fake tensors do not have."""

    def flattened(self: nn.RNNBase) -> None:
        for each in self._flat_weights:
            each.data_ptr()  # type: ignore[union-attr]

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flattened)
    program = capture(nn.LSTM(3, 4, batch_first=True), (torch.randn(2, 4, 3),), mode="train")
    assert program.backward is not None and nn.RNNBase.flatten_parameters is flattened


def test_other_threads_run_recurrent_layers_while_one_traces() -> None:
    layer, x = nn.LSTM(3, 4), torch.randn(64, 2, 3)
    wanted = layer(x)[0]
    with recurrent.kept_or_written_out(), ThreadPoolExecutor(1) as other:
        assert torch.equal(other.submit(layer, x).result()[0], wanted)
