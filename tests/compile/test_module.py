"""The optimized module in use: guards, new programs, copies, torch.compile, DDP."""

from __future__ import annotations

import copy
import datetime
import inspect
import io
import os
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import fusewright
from fusewright.compile.loading import load
from fusewright.compile.module import Optimized, optimized
from fusewright.compile.original import original_class
from fusewright.compile.owners import Modes
from fusewright.compile.solution import _specialise, solve
from fusewright.errors import CaptureError, ProblemError
from tests.support.gradients import medley_results, output_and_gradients
from tests.support.handmade import gemm_add_relu, medley
from tests.support.misfits import Made, misfits, no_program
from tests.support.tensors import assert_same


class Affine(nn.Module):
    """gemm_add_relu's model under a name that a pickle can find."""

    def __init__(self) -> None:
        super().__init__()
        self.gemm = nn.Linear(3, 5, bias=False)
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.gemm(x) + self.bias)


class Settings:
    def __init__(self) -> None:
        self.scale = 2.0

    def factor(self) -> float:
        return self.scale


class Configured(Affine):
    """It calls a method of an object, which Dynamo and watched places guard together."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.gemm(x) * self.settings.factor() + self.bias)


@pytest.fixture(scope="module")
def gemm(tmp_path_factory: pytest.TempPathFactory) -> Made:
    case = gemm_add_relu()
    return case, case.modes(tmp_path_factory.mktemp("gemm"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    case = medley()
    return case, case.modes(tmp_path_factory.mktemp("medley"))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def test_the_module_has_the_models_class_and_state(gemm: Made) -> None:
    model = copy.deepcopy(gemm[0].model)
    fast = optimized(model, gemm[1])
    assert isinstance(fast, type(model)) and type(fast).__name__ == "Model"
    assert list(fast.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(fast.parameters(), model.parameters(), strict=True))
    other = copy.deepcopy(model)
    nn.init.ones_(other.bias)
    fast.load_state_dict(other.state_dict())
    other.load_state_dict(fast.state_dict())
    assert_same(model.bias, other.bias)
    assert original_class(optimized(fast)) is type(model)


def test_replaced_and_tied_parameters_are_seen(gemm: Made) -> None:
    fast = optimized(copy.deepcopy(gemm[0].model), gemm[1])
    x = torch.randn(4, 3)
    fast.bias = nn.Parameter(torch.full((5,), 100.0))
    assert_same(fast(x), torch.relu(fast.gemm(x) + 100))
    fast.gemm.weight.data = torch.zeros(5, 3)
    assert_same(fast(x), torch.full((4, 5), 100.0))
    swapped = {"bias": torch.full((5,), 7.0), "gemm.weight": torch.zeros(5, 3)}
    assert_same(torch.func.functional_call(fast, swapped, (x,)), torch.full((4, 5), 7.0))


@pytest.mark.parametrize("kind", list(misfits(nn.Identity())))
def test_a_call_that_does_not_fit_runs_the_original_and_warns_once(gemm: Made, kind: str) -> None:
    model = copy.deepcopy(gemm[0].model)
    fast = optimized(copy.deepcopy(model), gemm[1], no_program)
    run, word = misfits(fast)[kind]
    with pytest.warns(RuntimeWarning, match=word):
        mine = run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    assert_same(mine, misfits(model)[kind][0]())


@pytest.mark.parametrize(
    "args",
    [(torch.randn(4, 9),), (torch.randn(4, 3).int(),), (), (None,)],
    ids=["shape", "dtype", "none given", "None"],
)
def test_an_error_of_eager_mode_is_raised(gemm: Made, args: tuple[Any, ...]) -> None:
    model = copy.deepcopy(gemm[0].model)
    fast = optimized(copy.deepcopy(model), gemm[1], no_program)
    with pytest.raises(Exception) as theirs:
        model(*args)
    with pytest.warns(RuntimeWarning), pytest.raises(theirs.type) as mine:
        fast(*args)
    assert str(mine.value) == str(theirs.value)


def test_a_new_kind_of_call_is_specialised_once(gemm: Made) -> None:
    case, modes = gemm
    asked: list[tuple[Any, ...]] = []

    def specialise(
        model: nn.Module, args: tuple[Any, ...], kwargs: Any, changed: Sequence[str]
    ) -> Modes | None:
        asked.append(args)
        assert type(model) is type(case.model)
        if args[0].dtype is torch.float64:
            raise CaptureError("no doubles here")
        return modes

    fast = optimized(copy.deepcopy(case.model), (), specialise)
    for rows in (4, 7, 4):
        fast(torch.randn(rows, 3))
    assert len(asked) == 1
    fast.double()
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = fast(x := torch.randn(4, 3, dtype=torch.float64))
    assert len(asked) == 2 and len(caught) == 0
    assert_same(out, torch.relu(x @ fast.gemm.weight.t() + fast.bias))


def test_small_batches_get_a_program_of_their_own() -> None:
    """The first program stays the first choice, for the batch that it was made for."""
    model = Affine().eval()
    solution = solve(model, (torch.randn(16, 3),), modes=("eval",))
    (mode,) = solution.bundle.modes
    bundle = replace(solution.bundle, modes=(replace(mode, worth=("s0", 8)),))
    modes = load(bundle, solution.kernels)
    fast = optimized(model, modes, partial(_specialise, "affine"))
    for rows in (16, 4, 7, 1, 8, 16):
        x = torch.randn(rows, 3)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(fast(x), model(x))
    kept = fast.__dict__["_fw_engine"].modes
    assert kept[0] is modes[0] and len(kept) == 2


def test_hooks_copies_and_moves(gemm: Made) -> None:
    fast = optimized(copy.deepcopy(gemm[0].model), gemm[1], no_program)
    x = torch.randn(4, 3)
    seen: list[torch.Tensor] = []
    handle = fast.register_forward_hook(lambda m, a, out: seen.append(out))
    assert_same(seen[0] if seen else fast(x), fast(x))
    handle.remove()
    twin = copy.deepcopy(fast)
    nn.init.zeros_(twin.bias)
    assert twin.bias is not fast.bias and twin.gemm is not fast.gemm
    assert_same(twin(x), torch.relu(x @ fast.gemm.weight.t()))
    assert type(twin(x).grad_fn).__name__ == "_FwFunctionBackward"
    assert_same(fast.half().float()(x), torch.relu(fast.gemm(x) + fast.bias))


def test_an_unpickled_module_compiles_its_programs_again(gemm: Made) -> None:
    fast = optimized(Affine(), gemm[1], no_program)
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    x = torch.randn(4, 3)
    for back in (pickle.loads(pickle.dumps(fast)), torch.load(buffer, weights_only=False)):
        assert isinstance(back, Optimized) and isinstance(back, Affine)
        assert back.__dict__["_fw_engine"].modes == []
        assert_same(back(x), fast(x))


def test_an_unpickled_module_runs_by_way_of_dynamo_again() -> None:
    model, x = Configured(), torch.randn(4, 3, requires_grad=True)
    fast = fusewright.optimize(model, x)
    back = pickle.loads(pickle.dumps(fast))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the original forward would warn
        for scale in (2.0, 3.0):
            model.settings.scale = back.settings.scale = scale
            assert_same(output_and_gradients(back, x), output_and_gradients(model, x))
    assert "forward reads self.settings" in str(fusewright.explain(back))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_sees_one_custom_operator(gemm: Made, backend: str) -> None:
    eager = copy.deepcopy(gemm[0].model)
    fast = optimized(copy.deepcopy(eager), gemm[1])
    compiled = torch.compile(fast, fullgraph=True, backend=backend)
    for rows in (4, 7, 9, 2):
        x = torch.randn(rows, 3)
        theirs = output_and_gradients(eager, x.clone().requires_grad_())
        assert_same(output_and_gradients(compiled, x.clone().requires_grad_()), theirs)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    output_and_gradients(compiled, torch.randn(23, 3).requires_grad_())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    with torch.no_grad():
        assert_same(compiled(x), eager(x))


def test_torch_compile_with_every_kind_of_output(mixed: Made) -> None:
    eager = copy.deepcopy(mixed[0].model)
    fast = optimized(copy.deepcopy(eager), mixed[1])
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph

    for backend in (keep, "aot_eager"):
        compiled = torch.compile(fast, fullgraph=True, backend=backend)
        for rows in (4, 6):
            x, index = torch.randn(rows, 3), torch.arange(rows)
            theirs = medley_results(eager, x.clone().requires_grad_(), index)
            mine = medley_results(compiled, x.clone().requires_grad_(), index)
            assert_same(mine.pop("out"), theirs.pop("out"))
            assert_same(mine, theirs)
    assert all("fusewright" in text and "_train_forward" in text for text in graphs)


def test_operators_obey_torch_librarys_rules(gemm: Made, mixed: Made) -> None:
    for case, modes in (gemm, mixed):
        mode = modes[0]
        leaves = [each for each in case.args if isinstance(each, torch.Tensor)]
        tensors = [each.detach().clone() for each in mode.gather(case.model, leaves)]
        inference, forward, backward = mode.operators
        torch.library.opcheck(inference, (tensors,))
        wanted = [each.clone().requires_grad_(each.is_floating_point()) for each in tensors]
        torch.library.opcheck(forward, (wanted,))
        known = [*tensors, *forward(tensors)]
        saved = [known[index] for index in mode.saved]
        shapes = [None] * len(mode.tangents)
        need = [each.is_floating_point() for each in tensors]
        torch.library.opcheck(backward, ([*saved, *shapes], [4], need))


def _worker(rank: int, folder: str, port_file: str) -> None:
    patience = datetime.timedelta(seconds=120)  # if the other process dies
    dist.init_process_group(
        "gloo", init_method=f"file://{port_file}", rank=rank, world_size=2, timeout=patience
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    case = gemm_add_relu()
    eager = copy.deepcopy(case.model)
    place = Path(folder) / str(rank)
    place.mkdir()
    fast = nn.parallel.DistributedDataParallel(optimized(case.model, case.modes(place)))
    x = torch.arange(24, dtype=torch.float32).reshape(8, 3) / 10
    fast(x[rank::2]).sum().backward()
    (eager(x).sum() / 2).backward()
    mine = [each.grad for each in fast.module.parameters()]
    assert_same(mine, [each.grad for each in eager.parameters()])
    dist.barrier()
    # Not by destroying the group: PyTorch 2.13 then joins a thread that may wait for our GIL.
    os._exit(0)


def test_ddp_on_two_processes(tmp_path: Path) -> None:
    mp.spawn(_worker, (str(tmp_path), str(tmp_path / "meeting")), nprocs=2)


def test_forward_keeps_its_signature() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
            """Scale x."""
            return x * scale

    fast = fusewright.optimize(Scaled(), torch.randn(3))
    assert inspect.signature(fast.forward) == inspect.signature(Scaled().forward)
    assert fast.forward.__doc__ == "Scale x."
    torch.testing.assert_close(fast(torch.ones(3), scale=3.0), torch.full((3,), 3.0))


def test_lazy_layers_need_their_shapes_first() -> None:
    model, x = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.ReLU()), torch.randn(2, 5)
    with pytest.raises(ProblemError, match="call the model once first"):
        fusewright.optimize(model, x)
    expected = model(x)
    torch.testing.assert_close(fusewright.optimize(model, x)(x), expected)
