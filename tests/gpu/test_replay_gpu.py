"""The mode reduce-overhead on a GPU: CUDA graphs of our own beside the ordinary way."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fusewright
from fusewright.compile.backend import backend
from fusewright.compile.replay import MOST_GRAPHS
from fusewright.compile.replayed import REPLAYED

WIDTH = 64


def mlp(layers: int = 4) -> nn.Module:
    made = [each for _ in range(layers) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*made).cuda()


class Block(nn.Module):
    """A transformer's block with attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.first(x)).view(batch, length, 3, 4, width // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        found = torch.softmax(q @ k.transpose(-2, -1) / 4, -1) @ v
        x = x + self.dropout(self.out(found.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.second(x)))


def both(model: nn.Module, x: Tensor, **how: Any) -> tuple[nn.Module, nn.Module]:
    """A module that launches kernel by kernel, and one that replays graphs."""
    plain = fusewright.optimize(copy.deepcopy(model), x, **how)
    return plain, fusewright.optimize(copy.deepcopy(model), x, mode="reduce-overhead", **how)


def parts(fast: Any) -> dict[str, Any]:
    return {
        f"{'train' if mode.training else 'eval'} {part.name}": part
        for mode in fast._fw_engine.modes
        for part in vars(mode)[REPLAYED]
    }


def captures(fast: Any) -> int:
    return sum(each.replays.captures for each in parts(fast).values() if each.replays is not None)


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def assert_equal(mine: Any, theirs: Any) -> None:
    """Equal but for rounding, by the norm: cuBLAS may add in another order within a graph."""
    for one, other in zip(tree_leaves(mine), tree_leaves(theirs), strict=True):
        one, other = one.detach(), other.detach()
        assert one.shape == other.shape and one.dtype is other.dtype
        apart, size = (one.double() - other.double()).norm(), other.double().norm()
        assert float(apart) <= 1e-5 * float(size) + 1e-6, (float(apart), float(size))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (mlp, (1, WIDTH)),
        (Block, (1, 16, WIDTH)),
        (lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8), nn.ReLU()), (5, WIDTH)),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), (2, 3, 16, 16)),
    ],
)
def test_values_and_gradients_over_many_calls(model: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain, fast = both(model().cuda(), torch.randn(shape, device="cuda"))
    kept: list[tuple[list[Tensor], list[Tensor]]] = []
    for _ in range(6):
        x = torch.randn(shape, device="cuda")
        kept.append((trained(fast, x), trained(plain, x)))
        assert_equal(list(fast.buffers()), list(plain.buffers()))
        with torch.no_grad():
            kept.append(([fast(x)], [plain(x)]))
    for mine, theirs in kept:  # later calls changed none of them
        assert_equal(mine, theirs)
    assert captures(fast) == 3, fusewright.explain(fast)


def test_an_optimizer_steps_between_the_calls() -> None:
    torch.manual_seed(0)
    plain, fast = both(mlp(), torch.randn(3, WIDTH, device="cuda"))
    steps = [torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in (plain, fast)]
    for _ in range(8):
        x = torch.randn(3, WIDTH, device="cuda")
        for each, step in zip((plain, fast), steps, strict=True):
            step.zero_grad()
            each(x).square().mean().backward()
            step.step()
        assert_equal(list(fast.parameters()), list(plain.parameters()))
    assert captures(fast) == 2


def test_two_forwards_then_two_backwards() -> None:
    torch.manual_seed(0)
    plain, fast = both(Block().cuda(), torch.randn(2, 8, WIDTH, device="cuda"))
    for _ in range(4):
        inputs = [torch.randn(2, 8, WIDTH, device="cuda", requires_grad=True) for _ in range(2)]
        found = []
        for each in (plain, fast):
            results = [each(x) for x in inputs]
            found.append(
                [
                    torch.autograd.grad(y.square().sum(), [x, *each.parameters()])
                    for x, y in zip(inputs, results, strict=True)
                ]
            )
        assert_equal(found[1], found[0])


def test_streams_wait_for_each_other() -> None:
    torch.manual_seed(0)
    plain, fast = both(mlp(), torch.randn(3, WIDTH, device="cuda"))
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    kept = []
    for at in range(20):
        with torch.cuda.stream(streams[at % 2]), torch.no_grad():
            x = torch.randn(3, WIDTH, device="cuda")
            if at % 3 == 0:
                torch.cuda._sleep(2_000_000)
            kept.append((fast(x), plain(x)))
    torch.cuda.synchronize()
    for mine, theirs in kept:
        assert_equal(mine, theirs)


def test_threads_with_streams_of_their_own() -> None:
    torch.manual_seed(0)
    plain, fast = both(mlp(), torch.randn(3, WIDTH, device="cuda"))
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator("cuda").manual_seed(seed)
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    x = torch.randn(3, WIDTH, device="cuda", generator=generator)
                    assert_equal(trained(fast, x), trained(plain, x))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert not any(each.replays.refused for each in parts(fast).values())
    torch.rand(3, device="cuda")  # the generator waits for no capture


def test_a_ninth_size_runs_as_usual() -> None:
    torch.manual_seed(0)
    plain, fast = both(mlp(), torch.randn(16, WIDTH, device="cuda"))
    with torch.no_grad():
        for batch in [*range(2, MOST_GRAPHS + 4), 2, 3]:
            for _ in range(3):
                x = torch.randn(batch, WIDTH, device="cuda")
                assert_equal(fast(x), plain(x))
    most = max(each.replays.graphs for each in parts(fast).values())
    assert most == MOST_GRAPHS and "other calls are launched" in str(fusewright.explain(fast))


def test_copies_and_parameters_that_move() -> None:
    torch.manual_seed(0)
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, WIDTH, device="cuda"), mode="reduce-overhead")
    x = torch.randn(3, WIDTH, device="cuda")
    for _ in range(3):
        trained(fast, x)
    twin = copy.deepcopy(fast)
    with torch.no_grad():
        twin[0].weight.mul_(2)
        model[2].weight.data = torch.randn(WIDTH, WIDTH, device="cuda")
    eager = mlp()
    eager.load_state_dict(twin.state_dict())
    for _ in range(4):
        torch.testing.assert_close(trained(twin, x), trained(eager, x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(trained(fast, x), trained(model, x), rtol=1e-4, atol=1e-4)


def test_the_only_graph_is_captured_again() -> None:
    torch.manual_seed(0)
    model = mlp()
    fast = fusewright.optimize(model, torch.randn(3, WIDTH, device="cuda"), mode="reduce-overhead")
    x = torch.randn(3, WIDTH, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            for _ in range(3):
                torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
            model[0].weight.data = torch.randn(WIDTH, WIDTH, device="cuda")
    assert captures(fast) == 3 and "; other calls" not in str(fusewright.explain(fast))


def test_memory_returns() -> None:
    x = torch.randn(256, 1024, device="cuda")
    layers = [nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU()]
    model = nn.Sequential(*layers).cuda()

    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    plain = fusewright.optimize(model, x)
    for _ in range(3):
        trained(plain, x)
    before = reserved()
    fast = fusewright.optimize(model, x, mode="reduce-overhead")
    for _ in range(4):
        trained(fast, x)
    assert reserved() > before
    del fast
    assert reserved() <= before


def test_dropout_draws_new_masks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).cuda()
    plain, fast = both(model, torch.randn(8, WIDTH, device="cuda"))
    x = torch.randn(8, WIDTH, device="cuda")
    masks = []
    for _ in range(6):
        given = x.clone().requires_grad_()
        y = fast(given)
        (grad,) = torch.autograd.grad(y.sum(), given)
        mask = y.detach() != 0
        # The gradient has the mask of its own forward.
        assert_equal(grad, mask.float() * 2 @ fast[0].weight)
        masks.append(mask)
    assert len({tuple(each.flatten().tolist()) for each in masks}) == 6
    found = []
    for each in (plain, fast):
        torch.manual_seed(7)
        found.append([each(x).detach() for _ in range(3)])
    assert_equal(found[1], found[0])  # the numbers that eager draws
    if parts(fast)["train forward"].replays is not None:
        assert captures(fast) == 3  # forward with an input that needs gradients and without


def test_a_capture_that_fails_disturbs_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.5)).cuda()
    x = torch.randn(8, WIDTH, device="cuda")
    fast: Any = fusewright.optimize(model, x, mode="reduce-overhead")
    driver = parts(fast)["train forward"].replays
    assert driver is not None
    mode = next(each for each in fast._fw_engine.modes if each.training)
    run = mode.forward._driver

    def waits(*given: Any) -> Any:
        results = run(*given)
        torch.cuda.synchronize()
        return results

    mode.forward._driver = waits
    for _ in range(4):
        given = x.clone().requires_grad_()
        fast(given).sum().backward()
        assert given.grad is not None and torch.isfinite(given.grad).all()
    assert "captur" in driver.refused and driver.graphs == 0
    torch.manual_seed(3)
    first = torch.rand(5, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(5, device="cuda"))
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        y = torch.nn.functional.dropout(x)
    other.replay()
    assert torch.isfinite(y).all()
    torch.cuda.empty_cache()


def test_inside_another_capture_and_without_waiting() -> None:
    torch.manual_seed(0)
    plain, fast = both(mlp(), torch.randn(3, WIDTH, device="cuda"))
    x = torch.randn(3, WIDTH, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            for _ in range(3):
                fast(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = fast(x)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_equal(y, plain(x))
    assert captures(fast) == 1


def test_precision_flags_get_graphs_of_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
    plain, fast = both(model, torch.randn(256, 512, device="cuda"), check=False)
    x = torch.randn(256, 512, device="cuda")
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        with torch.no_grad():
            for allowed in (False, True, False):
                torch.backends.cuda.matmul.allow_tf32 = allowed
                for _ in range(3):
                    assert torch.equal(fast(x), plain(x))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert captures(fast) == 2


@pytest.mark.parametrize("cast", [False, True])
def test_torch_compile_with_our_back_end(cast: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Block().cuda()
    fast = torch.compile(copy.deepcopy(model), backend=backend, mode="reduce-overhead")
    plain = torch.compile(copy.deepcopy(model), backend=backend)
    kept = []
    for at in range(10):
        x = torch.randn(2, 8 if at < 6 else 12, WIDTH, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            kept.append((trained(fast, x), trained(plain, x)))
            with torch.no_grad():
                kept.append(([fast(x)], [plain(x)]))
    for mine, theirs in kept:
        torch.testing.assert_close(mine, theirs, rtol=1e-2 if cast else 1e-4, atol=1e-2)
