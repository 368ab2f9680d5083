"""Held columns whose results are contiguous along the columns, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.loop_kernels import Size, access, channel_softmax_gradient, kernel
from fusewright.ir.graph import Dim, dim
from fusewright.ir.loop import Apply, Constant, Load, LoopKernel, Reduce, Store
from fusewright.kinds.registry import render
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose, legal
from fusewright.target.target import Target
from fusewright.tune.candidates import worth_trying
from tests.support import nvcc
from tests.support.cuda_on_host import CUDA, Scheduled, run
from tests.support.tensors import close, unaligned

S0 = Dim(1, ("s0",))
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
Shape = tuple[int, int, int]


def last(tensor: Tensor) -> Tensor:
    """The same values (image, channel, pixel), channels neighbours in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def operands(shape: Shape, dtype: str) -> dict[str, Tensor]:
    g, f, x = (torch.randn(shape) for _ in range(3))
    found = {"g": g, "f": f, "y": x.softmax(1) if shape[1] else x}
    return {name: each.to(getattr(torch, dtype)) for name, each in found.items()}


def exact_gradient(g: Tensor, f: Tensor, y: Tensor) -> Tensor:
    g, f, y = g.double(), f.double(), y.double()
    return y * (g * f - (g * f * y).sum(1, keepdim=True))


def staging(channels: int, down: int, lanes: int, across: int = 32) -> Schedule:
    unroll = -(-channels // down)
    return Schedule(
        "transpose_column", lanes, across * down, across=across, unroll=unroll, cached=True
    )


def scheduled(shape: Shape, dtype: str) -> Scheduled:
    """Vectors wherever they are whole. Different shapes have different shares of a column."""
    _, channels, area = shape
    most = {"float64": 1, "float32": 2}.get(dtype, 4)
    lanes = next(n for n in (most, 2, 1) if channels % n == 0 and area % n == 0 and n <= most)
    down = 4 if channels <= 32 else 8 if channels <= 64 else 16
    return channel_softmax_gradient(S0, channels, area, dtype), staging(channels, down, lanes)


SHAPES = [(2, 64, 96), (3, 17, 45), (1, 40, 70), (2, 68, 132), (2, 9, 33), (0, 40, 70)]
EVERY = {kind: tuple(scheduled(shape, kind) for shape in SHAPES[:5]) for kind in TOLERANCE}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_gradient_of_planes_in_channels_last(shape: Shape, dtype: str) -> None:
    tensors = operands(shape, dtype)
    dx = last(torch.full(shape, 9.0, dtype=getattr(torch, dtype)))
    loop, picked = scheduled(shape, dtype)
    exact = exact_gradient(**tensors)
    for g in (tensors["g"], unaligned(tensors["g"])):
        dx.fill_(9)
        run(loop, tensors | {"g": g, "dx": dx}, {"s0": shape[0]}, picked, EVERY[dtype])
        close(dx, exact, TOLERANCE[dtype])


def both_layouts(batch: Size, channels: int, area: Size, dtype: str) -> LoopKernel:
    """Centred channels in either layout, which of them are positive, and their sum."""
    spread, area = dim(area) * channels, dim(area)
    planes, pixels = (spread, 1, area), (spread, channels, 1)
    body = [
        Load("x", dtype, access("x", *planes)),
        Load("bias", dtype, access("bias", 0, 0, 1)),
        Constant("zero", "float32", 0.0),
        Apply("wide", "float32", "cast", ("x",)),
        Reduce("total", "float32", "sum", "wide"),
        Apply("y", "float32", "sub", ("wide", "total")),
        Apply("z", "float32", "mul", ("y", "bias")),
        Apply("up", "bool", "gt", ("y", "zero")),
        Store("y", "float32", access("planes", *planes)),
        Store("z", dtype, access("pixels", *pixels)),
        Store("up", "bool", access("up", *pixels)),
        Store("total", "float32", access("sums", area, 1, 0)),
    ]
    outputs = {"planes": "float32", "pixels": dtype, "up": "bool", "sums": "float32"}
    inputs = {"x": dtype, "bias": dtype}
    return kernel("both_layouts", [batch, area], [channels], inputs, outputs, body)


BOTH = [(2, 24, 100), (3, 33, 47), (2, 16, 37)]
BOTH_LAYOUTS = tuple(
    (both_layouts(S0, channels, area, kind), staging(channels, 8, 2 if channels == 24 else 1))
    for _, channels, area in BOTH
    for kind in ("float32", "float16")
)


@pytest.mark.parametrize("shape", BOTH)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_several_outputs_in_both_layouts(shape: Shape, dtype: str) -> None:
    n, channels, area = shape
    kind = getattr(torch, dtype)
    x, bias = torch.randn(shape).to(kind), torch.randn(channels).to(kind)
    out: Mapping[str, Tensor] = {
        "planes": torch.full(shape, 9.0),
        "pixels": last(torch.full(shape, 9.0, dtype=kind)),
        "up": last(torch.zeros(shape, dtype=torch.bool)),
        "sums": torch.empty(n, area),
    }
    at = next(i for i in BOTH_LAYOUTS if i[0] == both_layouts(S0, channels, area, dtype))
    run(at[0], {"x": x, "bias": bias, **out}, {"s0": n}, at[1], BOTH_LAYOUTS)
    total = x.double().sum(1)
    y = x.double() - total[:, None]
    close(out["sums"], total, 1e-5)
    close(out["planes"], y, 1e-5)
    close(out["pixels"], y * bias.double()[:, None], TOLERANCE[dtype])
    assert torch.equal(out["up"], out["planes"] > 0)
    out["up"].fill_(False)
    run(at[0], {"x": x, "bias": bias, **out, "pixels": None}, {"s0": n}, at[1], BOTH_LAYOUTS)
    assert torch.equal(out["up"], out["planes"] > 0), "without an output that is not wanted"


def softmax(channels: int, area: int, dtype: str) -> LoopKernel:
    spread = channels * area
    body = [
        Load("x", dtype, access("x", spread, 1, area)),
        Reduce("most", dtype, "max", "x"),
        Apply("shifted", dtype, "sub", ("x", "most")),
        Apply("power", dtype, "exp", ("shifted",)),
        Reduce("total", dtype, "sum", "power"),
        Apply("y", dtype, "div", ("power", "total")),
        Store("y", dtype, access("y", spread, channels, 1)),
    ]
    return kernel("softmax", [S0, area], [channels], {"x": dtype}, {"y": dtype}, body)


SOFTMAXES = tuple((softmax(24, 100, kind), staging(24, 8, 2)) for kind in ("float32", "bfloat16"))


@pytest.mark.parametrize(("at", "dtype"), list(enumerate(("float32", "bfloat16"))))
def test_values_that_are_kept_between_sweeps(at: int, dtype: str) -> None:
    x = torch.randn(3, 24, 100).to(getattr(torch, dtype))
    y = last(torch.full_like(x, 9))
    loop, picked = SOFTMAXES[at]
    run(loop, {"x": x, "y": y}, {"s0": 3}, picked, SOFTMAXES)
    close(y, x.double().softmax(1), TOLERANCE[dtype])


def grouped(groups: int, each: tuple[int, int], area: Size) -> LoopKernel:
    """Two inner axes: vectors end with the last one. The result has a column in pieces."""
    parts, channels = each
    width, area = parts * channels, dim(area)
    spread = area * (groups * width)
    planes = (spread, area * width, 1, area * channels, area)
    pieces = (spread, area * channels, channels, area * (groups * channels), 1)
    body = [
        Load("x", "float32", access("x", *planes)),
        Reduce("most", "float32", "max", "x"),
        Apply("y", "float32", "sub", ("x", "most")),
        Store("y", "float32", access("y", *pieces)),
    ]
    names = {"x": "float32"}, {"y": "float32"}
    return kernel("grouped", [S0, groups, area], [parts, channels], *names, body)


@pytest.mark.parametrize("area", [36, 35])
def test_columns_in_pieces_and_a_dynamic_extent(area: int) -> None:
    """Whether vectors are whole is asked when the kernel is called."""
    groups, parts, channels = 3, 5, 6
    loop, picked = grouped(groups, (parts, channels), Dim(1, ("s1",))), staging(30, 8, 2, 16)
    x = torch.randn(2, groups, parts, channels, area)
    y = torch.full((2, parts, groups, area, channels), 9.0)
    run(loop, {"x": x, "y": y}, {"s0": 2, "s1": area}, picked)
    exact = x - x.amax((2, 3), keepdim=True)
    assert torch.equal(y.permute(0, 2, 1, 4, 3), exact)


def test_offsets_of_64_bits() -> None:
    shape = (2, 24, 40)
    loop = channel_softmax_gradient(S0, *shape[1:])
    wide = tuple((replace(loop, name=f"wide_{n}"), staging(24, 4, n)) for n in (1, 2))
    for each, picked in wide:
        far = replace(each, body=tuple(_far(item) for item in each.body))
        tensors = operands(shape, "float32")
        dx = last(torch.full(shape, 9.0))
        text = render([(far, replace(picked, wide_index=True))], CUDA).text
        assert f"transpose_column<int64_t, {picked.lanes}, " in text
        run(far, tensors | {"dx": dx}, {"s0": 1}, replace(picked, wide_index=True))
        close(dx[:1], exact_gradient(**tensors)[:1], 1e-5)
        assert bool((dx[1:] == 9).all()), "one image is asked for"


def _far(item: object) -> object:
    """The access with images that are further apart than 32 bits reach."""
    if not isinstance(item, Load | Store):
        return item
    _, *steps = item.access.strides
    return replace(item, access=replace(item.access, strides=(Dim(1 << 31), *steps)))


def held(kind: str, lanes: int, threads: int, unroll: int) -> Schedule:
    return Schedule(kind, lanes, threads, unroll=unroll, cached=True)


def test_large_results_along_the_columns_are_staged() -> None:
    sizes = {"s0": 16}
    volume = channel_softmax_gradient(S0, 64, 32 * 64 * 64)
    picked = choose(volume, CUDA, sizes)
    assert replace(picked, wide_index=False) == held("transpose_column", 2, 256, 8)
    odd = choose(channel_softmax_gradient(S0, 17, 4097), CUDA, sizes)
    assert replace(odd, wide_index=False) == held("transpose_column", 1, 128, 5)
    thin = choose(channel_softmax_gradient(S0, 4, 4096), CUDA, sizes)
    assert thin.kind == "column", "less than a sector of each column"
    planes = replace(volume, body=tuple(_in_planes(item) for item in volume.body))
    assert choose(planes, CUDA, sizes).kind == "column", "nothing to stage"
    assert choose(volume, Target.host(), sizes).kind == "row"


def _in_planes(item: object) -> object:
    if isinstance(item, Store):
        area = 32 * 64 * 64
        return replace(item, access=access("dx", 64 * area, 1, area))
    return item


def test_which_schedules_are_legal() -> None:
    loop = channel_softmax_gradient(S0, 64, 4096)
    assert legal(loop, held("transpose_column", 2, 256, 8), CUDA)
    assert legal(loop, held("column", 1, 256, 8), CUDA)
    assert not legal(loop, held("column", 2, 256, 8), CUDA), "its stores are strided"
    assert not legal(loop, held("transpose_column", 2, 256, 4), CUDA), "half of a column"
    assert not legal(loop, Schedule("transpose_column", 2, 256, unroll=8), CUDA), "not held"
    assert not legal(loop, held("transpose_column", 2, 256, 8), Target.host())
    odd = channel_softmax_gradient(S0, 63, 4096)
    assert not legal(odd, held("transpose_column", 2, 256, 8), CUDA), "vectors along channels"
    long = both_layouts(S0, 512, 4096, "float32")
    assert not legal(long, held("transpose_column", 1, 1024, 16), CUDA), "131 KB"
    single = replace(long, body=tuple(i for i in long.body if not _stores(i, "up")))
    assert legal(single, held("transpose_column", 1, 1024, 16), CUDA), "66 KB"
    tried = [each for each in worth_trying(loop, CUDA, {"s0": 16}) if isinstance(each, Schedule)]
    kinds = [each.kind for each in tried if each.cached]
    assert kinds.count("transpose_column") >= 3 and "column" in kinds


def _stores(item: object, value: str) -> bool:
    return isinstance(item, Store) and item.value == value


@nvcc.needed
def test_compiles_without_spills(tmp_path: Path) -> None:
    sizes, loops = {"s0": 16}, []
    for channels, dtype in ((64, "float32"), (64, "bfloat16"), (17, "float32"), (40, "float64")):
        loop = channel_softmax_gradient(S0, channels, 65536, dtype)
        loops.append(replace(loop, name=f"{dtype}_{channels}"))
    loops.append(both_layouts(S0, 256, 4096, "float16"))
    picked = [(loop, choose(loop, CUDA, sizes)) for loop in loops]
    assert {each.kind for _, each in picked} == {"transpose_column"}
    nvcc.no_spills(render(picked, CUDA).text, tmp_path)
