"""CUDA graphs of our own, on a stand-in: when calls are captured, replayed, or left alone."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.compile.backend import backend
from fusewright.compile.replay import MOST_CAPTURES, MOST_GRAPHS
from fusewright.compile.replayed import REPLAYED
from fusewright.errors import ProblemError
from tests.support.replays import HostMachines
from tests.support.tensors import assert_same

HOW: dict[str, Any] = {"mode": "reduce-overhead", "check": False}


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> HostMachines:
    return HostMachines(monkeypatch)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def mlp(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh())


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def test_calls_are_replayed_from_the_third_on_and_give_new_values(machines: HostMachines) -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, 6), **HOW)
    counts, kept, expected = [], [], []
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(3, 6)
            kept.append(fast(x))
            expected.append(model(x))
            counts.append((machines.captures, machines.replays))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    assert_same(kept, expected)  # later calls have not changed earlier results
    assert len({each.data_ptr() for each in kept}) == 5


def test_training_with_steps_of_an_optimizer(machines: HostMachines) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    fast = fusewright.optimize(model, torch.randn(3, 6), **HOW)
    steps = [torch.optim.Adam(each.parameters(), 0.1) for each in (fast, twin)]
    for _ in range(6):
        x = torch.randn(3, 6)
        for each, step in zip((fast, twin), steps, strict=True):
            step.zero_grad()
            each(x).square().sum().backward()
            step.step()
        assert_same(list(fast.parameters()), list(twin.parameters()))
    assert machines.captures == 2 and machines.replays == 10


def test_forwards_before_their_backwards(machines: HostMachines) -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, 6), **HOW)
    for _ in range(3):
        inputs = [torch.randn(3, 6, requires_grad=True) for _ in range(3)]
        results = [fast(x) for x in inputs]
        found = [torch.autograd.grad(y.sum(), x) for x, y in zip(inputs, results, strict=True)]
        assert_same(found, [torch.autograd.grad(model(x).sum(), x) for x in inputs])
    y = fast(inputs[0])
    first = torch.autograd.grad(y.sum(), inputs[0], retain_graph=True)
    fast(inputs[1]).sum().backward()
    assert_same(torch.autograd.grad(y.sum(), inputs[0]), first)


def test_sizes_take_turns_in_training(machines: HostMachines) -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(5, 6), **HOW)
    for batch in (5, 3, 5, 3, 4, 4, 5, 3, 4):
        x = torch.randn(batch, 6)
        assert_same(trained(fast, x), trained(model, x))
    assert machines.captures == 6 and machines.replays == 12


def test_gradients_are_the_callers_own(machines: HostMachines) -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, 6), **HOW)
    kept, expected = [], []
    for _ in range(4):
        x = torch.randn(3, 6)
        kept.append(trained(fast, x))
        expected.append(trained(model, x))
    assert_same(kept, expected)
    fast.zero_grad()
    for x in (torch.ones(3, 6), torch.full((3, 6), 2.0)):  # they accumulate
        fast(x).sum().backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    (twin(torch.ones(3, 6)).sum() + twin(torch.full((3, 6), 2.0)).sum()).backward()
    assert_same([p.grad for p in fast.parameters()], [p.grad for p in twin.parameters()])


def test_a_ninth_size_runs_as_usual_and_the_log_says_so_once(
    machines: HostMachines, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(16, 6), **HOW)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "fusewright"):
        for batch in [*range(2, MOST_GRAPHS + 4), 2]:
            for _ in range(3):
                x = torch.randn(batch, 6)
                assert_same(fast(x), model(x))
    assert machines.captures == MOST_GRAPHS
    assert sum("without a CUDA graph" in each for each in caplog.messages) == 1
    said = f"train mode, inference: {MOST_GRAPHS} CUDA graphs; other calls are launched kernel"
    assert said in str(fusewright.explain(fast))


def test_a_parameter_that_moves_is_captured_again_but_not_for_ever(machines: HostMachines) -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, 6), **HOW)
    x = torch.randn(3, 6)
    kept = []
    with torch.no_grad():
        for _ in range(MOST_CAPTURES + 6):
            assert_same(fast(x), model(x))
            assert_same(fast(x), model(x))
            kept.append(model[0].weight.data)
            model[0].weight.data = torch.randn(6, 6)
    assert machines.captures == MOST_CAPTURES
    assert "32 calls were captured" in str(fusewright.explain(fast))


def test_a_failed_capture_leaves_the_ordinary_way(
    machines: HostMachines, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, 6), **HOW)
    machines.all[0].failure = RuntimeError("operation not permitted when stream is capturing")
    with caplog.at_level(logging.WARNING, "fusewright"):
        for _ in range(4):
            x = torch.randn(3, 6)
            assert_same(trained(fast, x), trained(model, x))
    assert machines.captures == 0
    assert sum("operation not permitted" in each for each in caplog.messages) == 2
    said = str(fusewright.explain(fast))
    assert "train mode, forward: 0 CUDA graphs; calls are launched kernel by kernel: op" in said


def test_copies_have_graphs_of_their_own(machines: HostMachines) -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, 6), **HOW)
    x = torch.randn(3, 6)
    with torch.no_grad():
        fast(x), fast(x)
        twin = copy.deepcopy(fast)
        twin[0].weight.mul_(2)
        plain = mlp()
        plain.load_state_dict(twin.state_dict())
        for _ in range(3):
            assert_same(twin(x), plain(x))
            assert_same(fast(x), model(x))
    assert [len(each.graphs) for each in machines.all] == [1, 1]
    again = pickle.loads(pickle.dumps(fast))
    with torch.no_grad():
        for _ in range(3):
            assert_same(again(x), model(x))
    assert machines.captures == 3


def test_graphs_go_with_their_module(machines: HostMachines) -> None:
    fast = fusewright.optimize(mlp(), torch.randn(3, 6), **HOW)
    with torch.no_grad():
        for _ in range(3):
            fast(torch.randn(3, 6))
    parts = [part for mode in fast._fw_engine.modes for part in vars(mode)[REPLAYED]]
    gone = [weakref.ref(part.replays) for part in parts]
    graph = weakref.ref(machines.all[0].graphs[0])
    machines.all.clear()
    del parts
    gc.collect()
    gc.disable()
    try:
        assert graph() is not None and all(each() is not None for each in gone)
        del fast
        assert not any(each() for each in gone)  # at once: they hold the memory of a GPU
    finally:
        gc.enable()
    gc.collect()  # the stand-in itself is a cycle
    assert graph() is None


def test_buffers_are_updated_in_place(machines: HostMachines) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.ReLU())
    twin = copy.deepcopy(model)
    fast = fusewright.optimize(model, torch.randn(5, 6), **HOW)
    for _ in range(5):
        x = torch.randn(5, 6)
        assert_same(trained(fast, x), trained(twin, x))
        assert_same(list(fast.buffers()), list(twin.buffers()))
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(5, 6)
            assert_same(fast(x), twin(x))
            assert_same(list(fast.buffers()), list(twin.buffers()))
    assert machines.captures == 3


def test_nothing_is_captured_inside_another_capture(machines: HostMachines) -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, 6), **HOW)
    machines.all[0].capturing = True
    x = torch.randn(3, 6)
    for _ in range(3):
        assert_same(trained(fast, x), trained(model, x))
    assert machines.captures == 0
    machines.all[0].capturing = False
    for _ in range(3):
        trained(fast, x)
    machines.all[0].capturing, before = True, machines.replays
    assert_same(trained(fast, x), trained(model, x))
    assert before == machines.replays == 4


def test_other_settings_of_pytorch_get_another_graph(machines: HostMachines) -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, 6), **HOW)
    x = torch.randn(3, 6)
    with torch.no_grad():
        for settings in ((), ("tf32",), ()):
            machines.all[0].settings = settings
            for _ in range(3):
                assert_same(fast(x), model(x))
    assert machines.captures == 2


def test_expanded_and_strided_tangents(machines: HostMachines) -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, 6), **HOW)
    for _ in range(3):
        for tangent in (torch.ones(()).expand(3, 6), torch.randn(6, 3).t(), torch.randn(3, 6)):
            x = torch.randn(3, 6, requires_grad=True)
            found = torch.autograd.grad(fast(x), [x, *model.parameters()], tangent)
            assert_same(found, torch.autograd.grad(model(x), [x, *model.parameters()], tangent))
    assert machines.captures == 4


def test_threads_share_a_module(machines: HostMachines) -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, 6), **HOW)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(20):
                x = torch.randn(3, 6, generator=generator)
                assert_same(trained(fast, x), trained(model, x))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong and machines.replays > 100


def test_each_thread_warms_up_before_it_captures(machines: HostMachines) -> None:
    fast = fusewright.optimize(mlp(), torch.randn(3, 6), **HOW)

    def call() -> None:
        with torch.no_grad():
            fast(torch.randn(3, 6))

    call()
    counts = []
    for _ in range(2):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        counts.append(machines.captures)
    call()
    assert counts[0] == 0 and machines.captures == 1


class Twice(nn.Module):
    """Results that are the same tensor, numbers, and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, *, factor: float = 2.0) -> dict[str, Any]:
        y = torch.relu(x) * self.scale
        return {"a": y, "b": y, "c": (y * factor).sum(), "n": 3}


def test_other_structures_of_results(machines: HostMachines) -> None:
    model = Twice()
    fast = fusewright.optimize(model, torch.randn(3, 6), {"factor": 3.0}, **HOW)
    for _ in range(4):
        x = torch.randn(3, 6, requires_grad=True)
        found, expected = fast(x, factor=3.0), model(x, factor=3.0)
        assert_same([found[key] for key in "abc"], [expected[key] for key in "abc"])
        assert found["a"].data_ptr() == found["b"].data_ptr() and found["n"] == 3
        assert_same(
            torch.autograd.grad(found["a"].sum() + found["c"], [x, model.scale]),
            torch.autograd.grad(expected["a"].sum() + expected["c"], [x, model.scale]),
        )
    assert machines.captures == 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_torch_compile_with_our_back_end(machines: HostMachines, dynamic: bool | None) -> None:
    model = mlp()
    fast = torch.compile(model, backend=backend, mode="reduce-overhead", dynamic=dynamic)
    for batch in (3, 3, 3, 5, 5, 5, 3):
        x = torch.randn(batch, 6)
        assert_same(trained(fast, x), trained(model, x))
        with torch.no_grad():
            assert_same(fast(x), model(x))
    assert machines.replays >= 9
    assert all(graph.buffers for each in machines.all for graph in each.graphs)


class Reads(nn.Module):
    """What forward reads of its settings is for Dynamo's guards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.settings = type("Settings", (), {"scale": 2.0})()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * self.settings.scale


def test_models_that_go_through_dynamo(machines: HostMachines) -> None:
    model = Reads()
    fast = fusewright.optimize(model, torch.randn(3, 6), **HOW)
    for scale in (2.0, 5.0):
        model.settings.scale = scale
        for _ in range(4):
            x = torch.randn(3, 6)
            assert_same(trained(fast, x), trained(model, x))
    assert machines.replays >= 8
    assert "captured by Dynamo, forward: 1 CUDA graph" in str(fusewright.explain(fast))


def test_parts_and_functions(machines: HostMachines) -> None:
    model = nn.Sequential(mlp(), mlp())
    twin = copy.deepcopy(model)
    x = torch.randn(3, 6)
    fusewright.optimize_parts(model, x, parts=("0", "1"), **HOW)
    for _ in range(3):
        assert_same(trained(model, x), trained(twin, x))
    assert machines.captures == 4

    @fusewright.optimize(mode="reduce-overhead")
    def gated(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x) * 2

    for _ in range(3):
        assert_same(gated(x), torch.nn.functional.silu(x) * 2)
        x = x + 1
    assert machines.captures == 5


def test_on_a_cpu_the_mode_changes_nothing_and_says_so() -> None:
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, 6), mode="reduce-overhead")
    for _ in range(3):
        x = torch.randn(3, 6)
        assert_same(trained(fast, x), trained(model, x))
    said = str(fusewright.explain(fast))
    assert "forward: 0 CUDA graphs; calls are launched kernel by kernel: there are CUDA" in said
    assert "CUDA graph" not in str(fusewright.explain(fusewright.optimize(model, x)))
    compiled = torch.compile(model, backend=backend, mode="reduce-overhead")
    assert_same(trained(compiled, x), trained(model, x))


def test_other_modes_are_refused() -> None:
    with pytest.raises(ProblemError, match="optimize has no mode 'fast'; it has default, reduce-"):
        fusewright.optimize(mlp(), torch.randn(3, 6), mode="fast")
