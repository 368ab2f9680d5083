"""Optimized modules in several processes: DDP, FSDP2, tensor parallelism, data loaders."""

from __future__ import annotations

import datetime
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import fusewright
from fusewright.compile.backend import backend
from tests.support.composed import ROWS, WIDTH, eager, example, ours, weigh

Wrap = Callable[[nn.Module], nn.Module]


def _optimize(model: nn.Module) -> nn.Module:
    return fusewright.optimize(model, example(2), modes=("train",))


def _compile(model: nn.Module) -> nn.Module:
    model.compile(backend=backend)
    return model


def _replicated(net: Any, wrap: Wrap) -> nn.Module:
    return wrap(DistributedDataParallel(net))


def _shard(net: Any) -> nn.Module:
    for each in (net.a, net.b, net):
        fully_shard(each)
    return net  # type: ignore[no-any-return]


def _sharded_blocks(net: Any, wrap: Wrap) -> nn.Module:
    net.a, net.b = wrap(net.a), wrap(net.b)
    return _shard(net)


def _sharded_first(net: Any, wrap: Wrap) -> nn.Module:
    _shard(net)
    net.a, net.b = wrap(net.a), wrap(net.b)
    return net  # type: ignore[no-any-return]


def _sharded_model(net: Any, wrap: Wrap) -> nn.Module:
    return _shard(wrap(net))


def _tensor_parallel(net: Any, wrap: Wrap) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for each in (net.a, net.b):
        parallelize_module(each, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return wrap(net)


# How the model is made, how it is wrapped, and what the one warning says.
CASES: dict[str, tuple[Callable[[Any, Wrap], nn.Module], Wrap, str]] = {
    "a model of DDP": (_replicated, _optimize, "optimize the model inside it"),
    "sharded blocks": (_sharded_blocks, _optimize, ""),
    "blocks after sharding": (_sharded_first, _optimize, ""),
    "a sharded model": (_sharded_model, _optimize, "hooks of a must see its calls"),
    "tensor parallel": (_tensor_parallel, _optimize, "hooks of a.up must see its calls"),
    "tensor parallel, compiled": (_tensor_parallel, _compile, ""),
}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _trained(model: nn.Module, rank: int) -> list[Tensor]:
    """Outputs and gradients of two steps, each process with its own rows."""
    descent = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    split = not any(type(each) is DTensor for each in model.parameters()) or hasattr(
        model, "unshard"
    )
    x = example()[2 * rank : 2 * rank + 2] if split else example(2)
    for _ in range(2):
        y = model(x)
        weigh(y).backward()
        gradients = [_whole(p.grad) for p in model.parameters() if p.grad is not None]
        found += [y.detach(), *(each.clone() for each in gradients)]
        descent.step()
        descent.zero_grad()
    return found


def _tried(name: str, rank: int) -> str:
    """What is wrong with a case; empty if nothing is."""
    make, wrap, words = CASES[name]
    try:
        wanted = _trained(make(eager("programs"), lambda model: model), rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = _trained(make(eager("programs"), wrap), rank)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    except Exception:
        return traceback.format_exc()
    said = [str(each.message) for each in caught if each.category is RuntimeWarning]
    right = len(said) == 1 and words in said[0] if words else not said
    return "" if right else f"warnings: {said}"


def _worker(rank: int, meeting: str, told: str) -> None:
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=120)  # if the other process dies
    how: Any = {"init_method": f"file://{meeting}", "timeout": patience}
    dist.init_process_group("gloo", rank=rank, world_size=2, **how)
    found = {name: _tried(name, rank) for name in CASES}
    Path(f"{told}{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    # Not by destroying the group: PyTorch 2.13 then joins a thread that may wait for our GIL.
    os._exit(0)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two processes found wrong."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(_worker, (str(folder / "meeting"), str(folder / "told")), nprocs=2)
    return [pickle.loads((folder / f"told{rank}").read_bytes()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes(name: str, told: list[dict[str, str]]) -> None:
    assert [each[name] for each in told] == ["", ""]


class Rows(Dataset[Any]):
    """Data that a model makes in a process of the loader."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = example(ROWS, index).requires_grad_()
        y = self.model(x)
        (gradient,) = torch.autograd.grad(weigh(y), x)
        return y.detach(), gradient


def _loaded(model: nn.Module, **settings: Any) -> Iterator[Tensor]:
    for both in DataLoader(Rows(model), batch_size=2, **settings):
        yield from both


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_data_loaders(start: str) -> None:
    model, _ = ours("programs")
    assert model(torch.zeros(ROWS, WIDTH)).shape[0] == ROWS  # threads of ours have run
    settings: Any = {"num_workers": 2, "multiprocessing_context": start, "timeout": 120}
    found = list(_loaded(model, **settings))
    torch.testing.assert_close(found, list(_loaded(eager("programs"))), rtol=1e-4, atol=1e-5)
