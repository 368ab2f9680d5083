"""Kernels whose tensors differ in their contiguous axis: tiles transposed in shared memory.

They run by emulation, and nvcc compiles them where it is installed. The arithmetic must be that of
the plain driver.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.loop_kernels import Size, access, kernel
from fusewright.ir.graph import HALF_DTYPES, Dim, dim
from fusewright.ir.loop import Apply, Constant, Instruction, Load, LoopKernel, Reduce, Store
from fusewright.kinds.registry import render
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose, legal, workspace_bytes
from fusewright.schedule.transpose_tiles import staged, tile_bytes, tile_count
from fusewright.target.target import Target
from tests.support import nvcc
from tests.support.cuda_on_host import Scheduled, chosen, run
from tests.support.tensors import close, unaligned

S0 = Dim(1, ("s0",))
CUDA = Target.cuda()


def images(buffer: str, channels: int, area: int, last: bool) -> Load:
    """A tensor of images over the axes (image, channel, pixel)."""
    strides = (channels * area, 1, channels) if last else (channels * area, area, 1)
    return Load(buffer, "float32", access(buffer, *strides))


def written(item: Load, value: str, dtype: str = "float32") -> Store:
    return Store(value, dtype, item.access)


def epilogue(batch: Size, channels: int, area: int, dtype: str = "float32") -> LoopKernel:
    """y = 2·min(x, ½) + bias per channel, x in channels-last, and where x ≤ ½ in y's layout."""
    x, y, le = (images(name, channels, area, name == "x") for name in ("x", "y", "le"))
    body: list[Instruction] = [
        replace(x, dtype=dtype),
        Load("bias", dtype, access("bias", 0, 1, 0)),
        Constant("half", dtype, 0.5),
        Constant("two", dtype, 2.0),
        Apply("low", dtype, "minimum", ("x", "half")),
        Apply("twice", dtype, "mul", ("low", "two")),
        Apply("y", dtype, "add", ("twice", "bias")),
        Apply("le", "bool", "le", ("x", "half")),
        written(y, "y", dtype),
        written(le, "le", "bool"),
    ]
    inputs, outputs = {"x": dtype, "bias": dtype}, {"y": dtype, "le": "bool"}
    return kernel("epilogue", [batch, channels, area], [], inputs, outputs, body)


def both_ways(batch: Size, channels: int, area: int) -> LoopKernel:
    """a in channels-last and b in rows; a + b in rows, a · b in channels-last."""
    a, b = images("a", channels, area, True), images("b", channels, area, False)
    body: list[Instruction] = [
        a,
        b,
        Apply("total", "float32", "add", ("a", "b")),
        Apply("times", "float32", "mul", ("a", "b")),
        written(images("y", channels, area, False), "total"),
        written(images("z", channels, area, True), "times"),
    ]
    names = {"a": "float32", "b": "float32"}, {"y": "float32", "z": "float32"}
    return kernel("both_ways", [batch, channels, area], [], *names, body)


def gradient(batch: Size, channels: int, area: int) -> LoopKernel:
    """dz = where(mask, g, 0) in channels-last, of g and mask in rows; its sums per channel."""
    where = dict.fromkeys(("g", "mask"), (area, channels * area, 1))
    dz = (1, channels * area, channels)
    body: list[Instruction] = [
        Load("g", "float32", access("g", *where["g"])),
        Load("mask", "bool", access("mask", *where["mask"])),
        Constant("zero", "float32", 0.0),
        Apply("dz", "float32", "where", ("mask", "g", "zero")),
        Reduce("total", "float32", "sum", "dz"),
        Reduce("largest", "float32", "max", "g"),
        Store("dz", "float32", access("dz", *dz)),
        Store("total", "float32", access("sums", 1, 0, 0)),
        Store("largest", "float32", access("most", 1, 0, 0)),
    ]
    inputs = {"g": "float32", "mask": "bool"}
    outputs = {"dz": "float32", "sums": "float32", "most": "float32"}
    return kernel("gradient", [channels], [batch, area], inputs, outputs, body)


def distance(batch: Size, channels: int, area: int, rows: bool) -> LoopKernel:
    """Σ (a − b)² with a in channels-last and b in rows, over all or for each image."""
    spread = channels * area
    body: list[Instruction] = [
        Load("a", "float32", access("a", spread, 1, channels)),
        Load("b", "float32", access("b", spread, area, 1)),
        Apply("d", "float32", "sub", ("a", "b")),
        Apply("s", "float32", "mul", ("d", "d")),
        Reduce("total", "float32", "sum", "s"),
        Store("d", "float32", access("gap", spread, 1, channels)),
        Store("total", "float32", access("sums", int(rows), 0, 0)),
    ]
    outer, inner = ([batch], [channels, area]) if rows else ([], [batch, channels, area])
    names = {"a": "float32", "b": "float32"}, {"gap": "float32", "sums": "float32"}
    return kernel("distance", outer, inner, *names, body)


def last(tensor: torch.Tensor) -> torch.Tensor:
    """The same values (image, channel, pixel), channels neighbours in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


Shape = tuple[int, int, int]
SHAPES = [(1, 32, 32), (2, 64, 100), (3, 40, 33), (2, 130, 68), (1, 1, 5), (0, 32, 32)]
TILES, SPLITS = (32, 64), (1, 3)


def tiled_epilogue(shape: Shape, tile: int, dtype: str) -> Scheduled:
    _, channels, area = shape
    lanes = {"float64": 2}.get(dtype, 4)
    lanes = lanes if channels % lanes == 0 and area % lanes == 0 else 1
    return epilogue(S0, channels, area, dtype), Schedule("transpose", lanes, tile=tile)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_pointwise_kernel_of_transposed_operands(shape: Shape, tile: int, dtype: str) -> None:
    n, channels, area = shape
    kind = getattr(torch, dtype)
    x, bias = last(torch.randn(shape).to(kind)), torch.randn(channels).to(kind)
    y, le = torch.full(shape, 9.0, dtype=kind), torch.zeros(shape, dtype=torch.bool)
    loop, picked = tiled_epilogue(shape, tile, dtype)
    if min(channels, area) > 1:
        turned = [each for each in SHAPES if min(each[1:]) > 1]
        among = tuple(tiled_epilogue(each, t, dtype) for each in turned for t in TILES)
        run(loop, {"x": x, "bias": bias, "y": y, "le": le}, {"s0": n}, picked, among)
        wide = x.float() if dtype in HALF_DTYPES else x
        exact = wide.clamp(max=0.5) * 2 + bias.to(wide.dtype)[:, None]
        assert torch.equal(y, exact.to(kind)) and torch.equal(le, x <= 0.5)
    else:
        assert not legal(loop, picked, CUDA), "nothing to transpose"


@pytest.mark.parametrize("shape", [(2, 64, 100), (3, 33, 47), (2, 130, 68)])
@pytest.mark.parametrize("shifted", [False, True])
def test_transposed_loads_and_stores_share_a_tile(shape: Shape, shifted: bool) -> None:
    a, b = last(torch.randn(shape)), torch.randn(shape)
    y, z = torch.empty(shape), last(torch.empty(shape))
    loop = both_ways(S0, *shape[1:])
    picked = choose(loop, CUDA, {"s0": 64})
    assert picked.kind == "transpose" and tile_count(staged(loop)) == 1
    b = unaligned(b) if shifted else b
    run(loop, {"a": a, "b": b, "y": y, "z": z}, {"s0": shape[0]}, picked)
    assert torch.equal(y, a + b) and torch.equal(z, a * b)
    z.fill_(9)
    run(loop, {"a": a, "b": b, "y": None, "z": z}, {"s0": shape[0]}, picked)
    assert torch.equal(z, a * b), "an unwanted output is not written"


BESIDE = [(2, 64, 100), (3, 33, 47), (5, 130, 68), (0, 32, 32)]
GRADIENTS = tuple(
    (loop, Schedule("transpose_row", picked.lanes, splits=splits, tile=tile))
    for loop, picked in chosen((gradient(S0, *shape[1:]) for shape in BESIDE), s0=32)
    for splits, tile in itertools.product(SPLITS, TILES)
)


@pytest.mark.parametrize("shape", BESIDE)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("tile", TILES)
def test_sums_beside_a_transposed_store(shape: Shape, splits: int, tile: int) -> None:
    n, channels, area = shape
    g, mask = torch.randn(shape), torch.rand(shape) < 0.5
    dz, sums, most = last(torch.full(shape, 9.0)), torch.empty(channels), torch.empty(channels)
    loop = gradient(S0, channels, area)
    lanes = choose(loop, CUDA, {"s0": 32}).lanes
    assert choose(loop, CUDA, {"s0": 32}).kind == "transpose_row" and lanes in (1, 4, 2)
    picked = Schedule("transpose_row", lanes, splits=splits, tile=tile)
    tensors = {"g": g, "mask": mask, "dz": dz, "sums": sums, "most": most}
    run(loop, tensors, {"s0": n}, picked, GRADIENTS)
    exact = torch.where(mask, g, 0)
    assert torch.equal(dz, exact)
    close(sums, exact.double().sum((0, 2)), 1e-5)
    if n:
        assert torch.equal(most, g.amax((0, 2)))


OVER = [(2, 64, 100), (3, 33, 47), (5, 68, 132), (0, 32, 32)]
DISTANCES = tuple(
    (loop, replace(picked, splits=splits))
    for rows in (False, True)
    for loop, picked in chosen((distance(S0, *shape[1:], rows) for shape in OVER), s0=32)
    for splits in SPLITS
)


@pytest.mark.parametrize("shape", OVER)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("rows", [False, True])
def test_sums_over_the_transposed_axis(shape: Shape, splits: int, rows: bool) -> None:
    n, channels, area = shape
    a, b, gap = last(torch.randn(shape)), torch.randn(shape), last(torch.full(shape, 9.0))
    sums = torch.empty(n) if rows else torch.empty(())
    loop = distance(S0, channels, area, rows)
    picked = replace(choose(loop, CUDA, {"s0": 32}), splits=splits)
    assert picked.kind == "transpose_row" and picked.lanes == (4 if channels % 4 == 0 else 1)
    run(loop, {"a": a, "b": b, "gap": gap, "sums": sums}, {"s0": n}, picked, DISTANCES)
    exact = (a.double() - b.double()).square()
    assert torch.equal(gap, a - b)
    close(sums, exact.sum((1, 2)) if rows else exact.sum(), 1e-5)


def test_only_mixed_layouts_are_tiled() -> None:
    sizes = {"s0": 32}
    assert choose(epilogue(S0, 128, 15876), CUDA, sizes) == Schedule("transpose", 4, tile=64)
    assert choose(epilogue(S0, 32, 15876), CUDA, sizes).tile == 32
    assert choose(epilogue(S0, 7, 15876), CUDA, sizes).kind == "pointwise"
    assert choose(epilogue(S0, 128, 15876), Target.host(), sizes).kind == "pointwise"
    plain = epilogue(S0, 128, 15876)
    plain = replace(plain, body=tuple(_in_rows(item) for item in plain.body))
    assert choose(plain, CUDA, sizes).kind == "pointwise" and not staged(plain)
    reduced = gradient(S0, 128, 15876)
    picked = choose(reduced, CUDA, sizes)
    assert picked.kind == "transpose_row" and picked.splits > 132
    assert workspace_bytes(reduced, picked, CUDA) == Dim(128 * 16 * picked.splits)
    flat = replace(reduced, body=tuple(i for i in reduced.body if not _stores(i, "dz")))
    assert choose(flat, CUDA, sizes).kind == "row"


def _in_rows(item: Instruction) -> Instruction:
    if isinstance(item, Load) and item.name == "x":
        return images("x", 128, 15876, False)
    return item


def _stores(item: Instruction, value: str) -> bool:
    return isinstance(item, Store) and item.value == value


def test_legal_tiles() -> None:
    loop = epilogue(S0, 128, 64)
    assert tile_bytes(loop, 64) == 64 * 65 * 4
    assert legal(loop, Schedule("transpose", 4, 256, tile=64), CUDA)
    assert not legal(loop, Schedule("transpose", 4, 1024, tile=64), CUDA), "half rows"
    assert not legal(loop, Schedule("transpose", 8, 256, tile=64), CUDA)
    assert not legal(loop, Schedule("transpose", 4, 256, tile=16), CUDA)
    assert not legal(loop, Schedule("transpose_row", 4, 256, tile=64), CUDA)
    assert not legal(loop, Schedule("transpose", 4, 256, tile=64), Target.host())
    assert not legal(epilogue(S0, 127, 64), Schedule("transpose", 4, 256, tile=64), CUDA)
    wide = epilogue(S0, 128, 64, "float64")
    assert legal(wide, Schedule("transpose", 2, 256, tile=64), CUDA)
    assert not legal(gradient(S0, 128, 64), Schedule("transpose", 4, 256, tile=64), CUDA)


def test_a_dynamic_axis_is_checked_before_vectors_are_used() -> None:
    channels = 64
    body: list[Instruction] = [
        Load("x", "float32", access("x", 1, channels)),
        Store("x", "float32", access("y", S0, 1)),
    ]
    loop = kernel("turn", [channels, S0], [], {"x": "float32"}, {"y": "float32"}, body)
    for n in (40, 41):
        x, y = torch.randn(n, channels), torch.empty(channels, n)
        picked = run(loop, {"x": x, "y": y}, {"s0": n}, choose(loop, CUDA, {"s0": n}))
        assert picked.kind == "transpose" and picked.lanes == 4 and dim(n)
        assert torch.equal(y, x.T)


@nvcc.needed
def test_compiles_without_spills(tmp_path: Path) -> None:
    loops = [epilogue(S0, 128, 15876), both_ways(S0, 128, 15876), gradient(S0, 128, 15876)]
    loops += [distance(S0, 128, 15876, rows=True)]
    picked = [(loop, choose(loop, CUDA, {"s0": 128})) for loop in loops]
    nvcc.no_spills(render(picked, CUDA).text, tmp_path)
