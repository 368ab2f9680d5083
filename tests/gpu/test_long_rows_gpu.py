"""Rows in thread block clusters, and vectors that run on across rows, on a GPU against float64."""

from __future__ import annotations

import pytest
import torch

from benchmarks import loop_kernels
from fusewright.ir.graph import Dim
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose, legal
from fusewright.target.target import Target
from tests.support import tensors
from tests.support.loop_runs import run
from tests.support.tensors import unaligned

S0 = Dim(1, ("s0",))
CUDA = Target.cuda()


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    tensors.close(ours, exact, 1e-5)


@pytest.mark.parametrize("blocks", [0, 2, 4, 8, 16])
@pytest.mark.parametrize("columns", [50_257, 60_000, 131_071])
def test_softmax_in_clusters(columns: int, blocks: int) -> None:
    """As chosen, and in clusters of every size; in place, and from an unaligned address."""
    loop, lanes = loop_kernels.softmax(S0, columns), 4 if columns % 4 == 0 else 1
    threads = 1024 if blocks == 2 else 512
    unroll = -(-columns // (threads * lanes * max(1, blocks)))
    picked = Schedule("row", lanes, threads, unroll=unroll, cached=True, cluster=blocks, shared=1)
    picked = picked if blocks else choose(loop, CUDA, {"s0": 300})
    if not legal(loop, picked, CUDA):
        assert columns * 4 > blocks * 227 * 1024
        return
    x = torch.randn(300, columns, device="cuda") * 5
    x[7, 5], x[8, columns - 1], x[9] = torch.inf, torch.nan, -torch.inf
    exact = torch.softmax(x.double(), 1)
    for held in (x.clone(), unaligned(x)):
        y = torch.empty_like(x)
        for out in (y, held):
            run(loop, {"x": held, "y": out}, {"s0": 300}, CUDA, picked, threads=0)
            same = out.double().nan_to_num(nan=2.0)
            close(same, exact.nan_to_num(nan=2.0))


@pytest.mark.parametrize("columns", [65_535, 100_000])
def test_norms_in_clusters(columns: int) -> None:
    x = torch.randn(400, columns, device="cuda") + 3
    y = torch.empty_like(x)
    run(loop_kernels.row_norm(S0, columns), {"x": x, "y": y}, {"s0": 400}, CUDA, threads=0)
    close(y, x.double() / x.double().norm(dim=1, keepdim=True))
    weight, bias = torch.randn(columns, device="cuda"), torch.randn(columns, device="cuda")
    more = {each: torch.empty(400, device="cuda") for each in ("mean_out", "rstd_out")}
    given = {"x": x, "weight": weight, "bias": bias, "y": y, **more}
    run(loop_kernels.layer_norm(S0, columns), given, {"s0": 400}, CUDA, threads=0)
    norm = torch.nn.functional.layer_norm
    close(y, norm(x.double(), (columns,), weight.double(), bias.double(), 1e-5))
    close(more["mean_out"], x.double().mean(1))


def test_clusters_in_a_cuda_graph() -> None:
    loop = loop_kernels.softmax(S0, 131_072)
    x = torch.randn(300, 131_072, device="cuda")
    y, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    run(loop, {"x": x, "y": y}, {"s0": 300}, CUDA, threads=0)
    with torch.cuda.graph(graph):
        run(loop, {"x": x, "y": y}, {"s0": 300}, CUDA, threads=0)
    x.copy_(torch.randn_like(x))
    y.zero_()
    graph.replay()
    close(y, torch.softmax(x.double(), 1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_vectors_that_run_on_across_rows(dtype: str, shift: int) -> None:
    kind = getattr(torch, dtype)
    for rows, columns in ((300, 4095), (7, 1025), (3, 65_535)):
        room = torch.randn(2, rows * columns + shift, device="cuda").to(kind)
        x, y = (each[shift:].view(rows, columns) for each in room.unbind())
        by, b = (torch.randn(n, device="cuda").to(kind) for n in (rows, columns))
        loop = loop_kernels.scaled_rows(S0, columns, dtype)
        assert choose(loop, CUDA, {"s0": rows}).flat
        given = {"x": x, "by": by, "b": b, "y": y}
        run(loop, given, {"s0": rows}, CUDA, threads=0)
        bound = {"float16": 4e-3, "bfloat16": 3e-2}.get(dtype, 1e-6)
        exact = x.double() * by.double()[:, None] + b.double()
        torch.testing.assert_close(y.double(), exact, rtol=bound, atol=bound)
        g = torch.randn(5, columns, device="cuda").to(kind)
        spread = torch.empty(5, rows, columns, device="cuda", dtype=kind)
        loop = loop_kernels.spread_mean(S0, rows, columns, dtype)
        run(loop, {"g": g, "y": spread}, {"s0": 5}, CUDA, threads=0)
        exact = (g.double() / rows)[:, None].expand(spread.shape)
        torch.testing.assert_close(spread.double(), exact, rtol=bound, atol=1e-5)
