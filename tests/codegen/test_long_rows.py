"""Rows of odd length and rows that a cluster of blocks holds, run without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import loop_kernels
from fusewright.ir.graph import Dim, dim
from fusewright.ir.loop import Apply, Index, Load, LoopKernel, Reduce, Store
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose, legal
from fusewright.target.target import Target
from tests.support.cuda_on_host import CUDA, Scheduled, chosen, run, together
from tests.support.tensors import close, unaligned

S0 = Dim(1, ("s0",))
DTYPES = ("float16", "bfloat16", "float32", "float64")
COLUMNS = 1025
SPREADS = tuple((dtype, loop_kernels.spread_mean(S0, 3, COLUMNS, dtype)) for dtype in DTYPES)
SCALED = tuple((dtype, loop_kernels.scaled_rows(S0, COLUMNS, dtype)) for dtype in DTYPES)
FLAT = chosen((loop for _, loop in (*SPREADS, *SCALED)), s0=5)
TOLERANCES = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-6, "float64": 1e-14}


def values(*shape: int, dtype: str, shift: int = 0) -> torch.Tensor:
    """Random values, `shift` elements behind an aligned address; some are special."""
    count = torch.Size(shape).numel()
    x = torch.empty(count + shift, dtype=getattr(torch, dtype))[shift:].view(shape)
    x.copy_(torch.randn(shape))
    if count > 4:
        x.view(-1)[1], x.view(-1)[2], x.view(-1)[4] = torch.nan, torch.inf, -torch.inf
    return x


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
@pytest.mark.parametrize(("dtype", "loop"), SPREADS)
def test_vectors_of_a_broadcast_run_on_across_rows(
    dtype: str, loop: LoopKernel, shift: int
) -> None:
    for batch in (0, 1, 5):
        g, y = (values(batch, *rows, COLUMNS, dtype=dtype, shift=shift) for rows in ((), (3,)))
        y.fill_(9)
        picked = run(loop, {"g": g, "y": y}, {"s0": batch}, FLAT[DTYPES.index(dtype)][1], FLAT)
        assert picked.flat and picked.lanes == 16 // g.element_size()
        exact = (g.double() / 3)[:, None].expand(y.shape)
        bound = TOLERANCES[dtype]
        torch.testing.assert_close(y.double(), exact, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
@pytest.mark.parametrize(("dtype", "loop"), SCALED)
def test_vectors_of_scaled_rows_run_on_across_rows(
    dtype: str, loop: LoopKernel, shift: int
) -> None:
    for rows in (1, 5):
        x, y = (values(rows, COLUMNS, dtype=dtype, shift=shift) for _ in "xy")
        by, b = values(rows, dtype=dtype, shift=shift), values(COLUMNS, dtype=dtype, shift=1)
        schedule = FLAT[4 + DTYPES.index(dtype)][1]
        exact = (x.double() * by.double()[:, None]).to(x.dtype).double() + b.double()
        for out in (y, x):  # the second time in place
            run(loop, {"x": x, "by": by, "b": b, "y": out}, {"s0": rows}, schedule, FLAT)
            bound = TOLERANCES[dtype]
            torch.testing.assert_close(out.double(), exact, rtol=bound, atol=bound, equal_nan=True)


def positions(columns: int) -> LoopKernel:
    """x plus the number of its column, and a strided operand."""
    body = [
        Load("x", "float32", loop_kernels.row_major("x", S0, columns)),
        Load("s", "float32", loop_kernels.access("s", 0, 2)),
        Index("at", "float32", (dim(0), dim(1))),
        Apply("far", "float32", "add", ("x", "at")),
        Apply("y", "float32", "add", ("far", "s")),
        Store("y", "float32", loop_kernels.row_major("y", S0, columns)),
    ]
    inputs = {"x": "float32", "s": "float32"}
    return loop_kernels.kernel("positions", [S0, columns], [], inputs, {"y": "float32"}, body)


@pytest.mark.parametrize("columns", [1, 3, 131, 1021])
def test_indices_in_vectors_that_run_on(columns: int) -> None:
    loop, schedule = positions(columns), Schedule("pointwise", 4, 64, unroll=2, flat=True)
    x, s = torch.randn(7, columns), torch.randn(columns, 2)
    y = torch.empty_like(x)
    if columns == 1:  # then there is only one axis, whose vectors need no other way
        assert not legal(loop, schedule, CUDA)
        return
    run(loop, {"x": x, "s": s, "y": y}, {"s0": 7}, schedule)
    assert torch.equal(y, x + torch.arange(columns) + s[:, 0])


def test_vectors_run_on_only_where_it_pays() -> None:
    """Not if rows have whole vectors, or are short; not if what is written has gaps."""
    picked = [choose(loop_kernels.scaled_rows(S0, each), CUDA, {"s0": 99}) for each in (1024, 17)]
    assert not any(each.flat for each in picked)
    gaps = loop_kernels.scaled_rows(S0, COLUMNS)
    store = gaps.body[-1]
    assert isinstance(store, Store)
    apart = replace(store, access=loop_kernels.access("y", COLUMNS + 1, 1))
    gaps = replace(gaps, body=(*gaps.body[:-1], apart))
    assert not choose(gaps, CUDA, {"s0": 99}).flat
    assert not legal(gaps, Schedule("pointwise", 4, flat=True), CUDA)
    assert not legal(
        loop_kernels.scaled_rows(S0, COLUMNS), Schedule("pointwise", 4, flat=True), Target.host()
    )


def clustered(
    lanes: int, threads: int, unroll: int, blocks: int, stays: bool, flat: bool = False
) -> Schedule:
    found = Schedule("row", lanes, threads, unroll=unroll, cached=True, cluster=blocks)
    return replace(found, shared=1, stays=stays, flat=flat)


CLUSTERED: tuple[Scheduled, ...] = tuple(
    (make(S0, columns), schedule)
    for make in (loop_kernels.softmax, loop_kernels.row_norm, loop_kernels.layer_norm)
    for columns, schedule in (
        (5000, clustered(4, 128, 5, 2, False)),
        (3001, clustered(1, 64, 12, 4, True)),
        (1024, clustered(4, 64, 1, 4, True)),
        (130, clustered(1, 64, 12, 8, False)),
        (3001, clustered(4, 64, 3, 4, True, True)),
        (1027, clustered(4, 64, 3, 2, False, True)),
        (9, clustered(4, 64, 1, 2, True, True)),
    )
)


def outputs_of(name: str, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What such a kernel reads and writes besides x and y, and the exact y."""
    wide, columns = x.double(), x.shape[1]
    if name == "softmax":
        return {}, torch.softmax(wide, 1)
    if name == "row_norm":
        return {}, wide / wide.norm(dim=1, keepdim=True)
    weight, bias = torch.randn(columns), torch.randn(columns)
    norm = torch.nn.functional.layer_norm(wide, (columns,), weight.double(), bias.double(), 1e-5)
    more = {"mean_out": torch.empty(len(x)), "rstd_out": torch.empty(len(x))}
    return {"weight": weight, "bias": bias, **more}, norm


@pytest.mark.parametrize("at", range(len(CLUSTERED)))
def test_rows_in_clusters(at: int) -> None:
    """Also in place, with rows of large values, and from an address that has no whole vectors."""
    loop, schedule = CLUSTERED[at]
    columns = loop.inner_numel.factor
    x = torch.randn(5, columns) * 5
    x[1] = x[1] * 1e3 + 1e4
    more, exact = outputs_of(loop.name, x)
    for held in (x.clone(), unaligned(x)):
        y = torch.full_like(x, 9)
        run(loop, {"x": held, "y": y, **more}, {"s0": 5}, schedule, CLUSTERED)
        close(y, exact, 2e-5)
        run(loop, {"x": held, "y": held, **more}, {"s0": 5}, schedule, CLUSTERED)
        close(held, exact, 2e-5)
        if "mean_out" in more:
            close(more["mean_out"], x.double().mean(1), 1e-6)
    run(loop, {"x": x[:0], "y": x[:0], **more}, {"s0": 0}, schedule, CLUSTERED)


def test_rows_in_clusters_keep_nan_and_inf_to_themselves() -> None:
    loop, schedule = CLUSTERED[0]
    x = torch.randn(4, 5000)
    x[0, 4999], x[1, 7], x[2] = torch.nan, torch.inf, -torch.inf
    y = torch.empty_like(x)
    run(loop, {"x": x, "y": y}, {"s0": 4}, schedule, CLUSTERED)
    expected = torch.softmax(x.double(), 1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-9, equal_nan=True)


def test_a_gpu_without_clusters_reads_rows_again() -> None:
    loop, schedule = CLUSTERED[0]
    x, y = torch.randn(3, 5000), torch.empty(3, 5000)
    fresh: tuple[Scheduled, ...] = ((loop, schedule),)  # the driver is asked once a library
    library, _ = together(fresh)[loop, schedule]
    library.emulate_clusters(0)
    run(loop, {"x": x, "y": y}, {"s0": 3}, schedule, fresh)
    close(y, torch.softmax(x.double(), 1))


def long_rows() -> list[tuple[LoopKernel, int]]:
    return [
        (loop_kernels.row_norm(S0, 65_535), 4),
        (loop_kernels.softmax(S0, 393_216), 8),
        (loop_kernels.layer_norm(S0, 100_001), 8),
        (loop_kernels.softmax(S0, 50_257, "bfloat16"), 2),
    ]


@pytest.mark.parametrize(("loop", "least"), long_rows())
def test_the_heuristic_holds_long_rows_in_clusters(loop: LoopKernel, least: int) -> None:
    picked, without = choose(loop, CUDA, {"s0": 4096}), Target.cuda(tensor_cores=False)
    room = picked.threads * picked.cluster * picked.unroll * picked.lanes
    assert picked.cluster >= least and room >= loop.inner_numel.factor
    assert not legal(loop, picked, without)
    assert choose(loop, without, {"s0": 4096}).cluster == 1


def test_more_than_a_cluster_has_room_for_is_read_again() -> None:
    assert choose(loop_kernels.softmax(S0, 2_000_000), CUDA, {"s0": 4096}).cluster == 1
    too_large = clustered(4, 1024, 32, 8, False)
    assert not legal(loop_kernels.softmax(S0, 1_000_000), too_large, CUDA)
    fits = clustered(4, 1024, 12, 8, True)
    assert legal(loop_kernels.softmax(S0, 393_216), fits, CUDA)
    assert not legal(loop_kernels.softmax(S0, 393_217), fits, CUDA)
    assert not legal(loop_kernels.softmax(S0, 393_216), replace(fits, shared=2), CUDA)


SUMS = tuple(
    (loop_kernels.middle_reduction(S0, rows, 70, kind), Schedule("column", 1, 64, unroll=unroll))
    for rows, kind, unroll in ((301, "sum", 4), (301, "sum", 8), (5, "sum", 8), (301, "max", 4))
)


@pytest.mark.parametrize("at", range(len(SUMS)))
def test_a_few_elements_are_added_at_once(at: int) -> None:
    """Equal terms, and infinities: the plain sums of a few must not lose what a sum keeps."""
    loop, schedule = SUMS[at]
    rows = loop.inner_numel.factor
    x = torch.randn(3, rows, 70)
    x[:, :, 1], x[:, :, 2] = 0.1, 1e6 + 0.1
    x[1, 2, 3], x[0, rows - 1, 4], x[2, 0, 5] = torch.inf, -torch.inf, torch.nan
    y = torch.empty(3, 70)
    run(loop, {"x": x, "y": y}, {"s0": 3}, schedule, SUMS)
    reduce = next(item for item in loop.body if isinstance(item, Reduce))
    exact = x.double().sum(1) if reduce.kind == "sum" else x.double().amax(1)
    torch.testing.assert_close(y.double(), exact, rtol=3e-7, atol=1e-4, equal_nan=True)
