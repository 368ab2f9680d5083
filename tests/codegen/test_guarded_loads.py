"""Loads with bounds: every kind of loop, in both languages, and no read outside the tensor."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from benchmarks import loop_kernels
from fusewright.errors import CodegenError
from fusewright.ir.graph import Dim, dim
from fusewright.ir.loop import Access, Apply, Guard, Instruction, Load, LoopKernel, Reduce, Store
from fusewright.schedule.choice import Schedule
from fusewright.schedule.coalesce import coalesce
from fusewright.schedule.loops import choose, legal
from fusewright.target.target import Target
from tests.support import cuda_on_host, loop_runs
from tests.support.tensors import unaligned

S0 = Dim(1, ("s0",))
LANGUAGES = ("host", "cuda")


def run(language: str, loop, tensors, sizes, schedule=None) -> None:  # type: ignore[no-untyped-def]
    if language == "host":
        loop_runs.run(loop, tensors, sizes)
    else:
        cuda_on_host.run(loop, tensors, sizes, schedule)


def guard(start: int, size: int, *steps: int) -> Guard:
    return Guard(tuple(map(dim, steps)), start, size)


def shifted(
    area: tuple[int, int],
    step: tuple[int, int] = (1, 1),
    start: tuple[int, int] = (0, 0),
    strides: tuple[int, int] | None = None,
) -> Access:
    """x[b, i·step + start, j·step + start] over axes b, i, j; None: row-major."""
    (rows, columns), along = area, strides or (area[1], 1)
    offset = sum(at * stride for at, stride in zip(start, along, strict=True))
    return Access(
        "x",
        tuple(map(dim, (rows * columns, step[0] * along[0], step[1] * along[1]))),
        (dim(offset),),
        (guard(start[0], rows, 0, step[0], 0), guard(start[1], columns, 0, 0, step[1])),
    )


def moved(
    area: tuple[int, int], result: tuple[int, int], dtype: str = "float32", **at: tuple[int, int]
) -> LoopKernel:
    """The smaller of a shifted load and an unshifted one, so that two guards meet."""
    body: list[Instruction] = [
        Load("a", dtype, shifted(area, **at), -2.5),
        Load("b", dtype, shifted(area), math.inf),
        Apply("y", dtype, "minimum", ("a", "b")),
        Store("y", dtype, loop_kernels.row_major("y", S0, *result)),
    ]
    return loop_kernels.kernel("moved", [S0, *result], [], {"x": dtype}, {"y": dtype}, body)


def gathered(x: torch.Tensor, result, step, start, outside: float) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """The same, element by element."""
    y = torch.full((len(x), *result), outside, dtype=x.dtype)
    for i in range(result[0]):
        for j in range(result[1]):
            r, c = i * step[0] + start[0], j * step[1] + start[1]
            if 0 <= r < x.shape[1] and 0 <= c < x.shape[2]:
                y[:, i, j] = x[:, r, c]
    return y


@pytest.mark.sample(3)
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("area", "result", "step", "start"),
    [
        ((5, 8), (7, 12), (1, 1), (-1, -2)),
        ((5, 8), (5, 3), (1, 3), (0, -1)),
        ((4, 1030), (3, 2061), (2, 1), (-1, -1031)),
        ((3, 4), (2, 8), (1, 1), (7, 0)),
        ((3, 0), (4, 4), (1, 1), (-1, -1)),
    ],
)
def test_a_shifted_load_takes_the_other_value_outside(
    language: str, dtype: str, area, result, step, start
) -> None:  # type: ignore[no-untyped-def]
    loop = moved(area, result, dtype, step=step, start=start)
    for batch in (3, 0):
        x = torch.randn(batch, *area).to(getattr(torch, dtype))
        y = torch.full((batch, *result), 9.0, dtype=x.dtype)
        run(language, loop, {"x": x, "y": y}, {"s0": batch})
        first = gathered(x, result, step, start, -2.5)
        second = gathered(x, result, (1, 1), (0, 0), math.inf)
        assert torch.equal(y, torch.minimum(first, second))


@pytest.mark.parametrize("language", LANGUAGES)
def test_vectors_are_whole_where_their_axis_has_no_guard(language: str) -> None:
    """Rows are shifted and columns are not, as in channels-last."""
    rows, columns = 6, 24
    where = Access("x", (Dim(columns), Dim(1)), (Dim(-2 * columns),), (guard(-2, rows, 1, 0),))
    body = [
        Load("a", "bfloat16", where, 3.0),
        Store("a", "bfloat16", loop_kernels.access("y", columns, 1)),
    ]
    loop = loop_kernels.kernel("rows", [9, columns], [], {"x": "bfloat16"}, {"y": "bfloat16"}, body)
    assert choose(loop, Target.cuda(), {}).lanes == 8
    x = torch.randn(rows, columns).bfloat16()
    for given in (x, unaligned(x)):
        y = torch.zeros(9, columns).bfloat16()
        run(language, loop, {"x": given, "y": y}, {})
        assert torch.equal(y, F.pad(x, (0, 0, 2, 1), value=3.0))


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_any_lanes_are_legal_along_a_guarded_axis(lanes: int) -> None:
    loop = moved((5, 8), (7, 12), step=(1, 1), start=(-1, -2))
    schedule = Schedule("pointwise", lanes)
    assert (
        legal(loop, schedule, Target.cuda()) and choose(loop, Target.cuda(), {"s0": 2}).lanes == 1
    )
    x, y = torch.randn(2, 5, 8), torch.zeros(2, 7, 12)
    cuda_on_host.run(loop, {"x": x, "y": y}, {"s0": 2}, schedule)
    first = gathered(x, (7, 12), (1, 1), (-1, -2), -2.5)
    assert torch.equal(y, torch.minimum(first, gathered(x, (7, 12), (1, 1), (0, 0), math.inf)))


def reduced(rows: int, columns: int, along: bool, dtype: str) -> LoopKernel:
    """The largest and the sum of padded rows or columns, and one guarded value of each."""
    wide, long = columns + 3, rows + 2
    outer, inner = (long, wide) if along else (wide, long)
    steps = ((1, 0), (0, 1)) if along else ((0, 1), (1, 0))
    strides = (columns, 1) if along else (1, columns)
    x = Access(
        "x",
        tuple(map(dim, strides)),
        (Dim(-columns - 2),),
        (guard(-1, rows, *steps[0]), guard(-2, columns, *steps[1])),
    )
    one = Access("b", (Dim(1), Dim(0)), (Dim(-1),), (guard(-1, outer - 2, 1, 0),))
    # An element that is the same wherever there is one.
    same = Access("c", (Dim(0), Dim(0)), (), (guard(0, inner - 1, 0, 1),))
    body = [
        Load("x", dtype, x, -1.0),
        Load("b", "float32", one, 0.5),
        Load("c", "float32", same, 7.0),
        Apply("wide", "float32", "cast", ("x",)),
        Apply("s", "float32", "add", ("wide", "b")),
        Apply("t", "float32", "add", ("s", "c")),
        Reduce("total", "float32", "sum", "t"),
        Reduce("most", "float32", "max", "wide"),
        Store("total", "float32", loop_kernels.access("total", 1, 0)),
        Store("most", "float32", loop_kernels.access("most", 1, 0)),
    ]
    outputs = {"total": "float32", "most": "float32"}
    inputs = {"x": dtype, "b": "float32", "c": "float32"}
    return loop_kernels.kernel("reduced", [outer], [inner], inputs, outputs, body)


@pytest.mark.sample(3)
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("along", [True, False])
@pytest.mark.parametrize("lanes", [None, 2])
def test_reductions_over_a_guarded_axis(
    language: str, dtype: str, along: bool, lanes: int | None
) -> None:
    rows, columns = 6, 29
    loop = reduced(rows, columns, along, dtype)
    x = torch.randn(rows, columns).to(getattr(torch, dtype))
    padded = F.pad(x.float(), (2, 1, 1, 1), value=-1.0)
    padded = padded if along else padded.T
    b, c = torch.randn(padded.shape[0] - 2), torch.randn(1)
    total, most = torch.zeros(padded.shape[0]), torch.zeros(padded.shape[0])
    kind = Schedule("row", lanes, 32, rows=4) if along else Schedule("column", lanes, 64)  # type: ignore[arg-type]
    run(
        language,
        loop,
        {"x": x, "b": b, "c": c, "total": total, "most": most},
        {},
        kind if lanes and legal(loop, kind, Target.cuda()) else None,
    )
    last = torch.full((padded.shape[1],), float(c))
    last[-1] = 7.0
    exact = padded.double() + F.pad(b, (1, 1), value=0.5)[:, None] + last
    torch.testing.assert_close(total.double(), exact.sum(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(most, padded.amax(1))


def test_guarded_axes_are_not_merged() -> None:
    """Images and channels are merged into one axis; rows and columns are not."""
    x = Access("x", tuple(map(dim, (60, 20, 5, 1))), (), (guard(0, 4, 0, 0, 1, 0),))
    body = [Load("a", "float32", x), Store("a", "float32", loop_kernels.row_major("y", 2, 3, 4, 5))]
    loop = loop_kernels.kernel("apart", [2, 3, 4, 5], [], {"x": "float32"}, {"y": "float32"}, body)
    assert [axis.size for axis in coalesce(loop).axes] == [Dim(6), Dim(4), Dim(5)]


def test_stores_have_no_guards() -> None:
    body = [
        Load("a", "float32", loop_kernels.access("x", 1)),
        Store("a", "float32", Access("y", (Dim(1),), (), (guard(0, 3, 1),))),
    ]
    loop = loop_kernels.kernel("odd", [4], [], {"x": "float32"}, {"y": "float32"}, body)
    with pytest.raises(CodegenError, match=r"guard .* is not supported"):
        loop_runs.run(loop, {"x": torch.zeros(4), "y": torch.zeros(4)})


@pytest.fixture
def walled() -> Iterator[torch.Tensor]:
    """A page of floats between two pages that cannot be read."""
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for wall in (start, start + 2 * page):
        assert libc.mprotect(wall, page, 0) == 0  # PROT_NONE
    whole = torch.frombuffer(memory, dtype=torch.float32)
    yield whole[page // 4 : page // 2]
    for wall in (start, start + 2 * page):
        libc.mprotect(wall, page, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("turned", [False, True])
def test_nothing_outside_is_read(language: str, turned: bool, walled: torch.Tensor) -> None:
    rows, columns = 32, walled.numel() // 32
    x = walled.normal_().view(1, rows, columns)
    result, start = (rows + 70, columns + 90), (-35, -45)
    at = {"start": start}
    if turned:
        result, start = (columns + 90, rows + 70), (-45, -35)
        at = {"start": start, "strides": (1, columns)}
    area = (columns, rows) if turned else (rows, columns)
    body: list[Instruction] = [
        Load("a", "float32", shifted(area, **at), -2.5),
        Store("a", "float32", loop_kernels.row_major("y", S0, *result)),
    ]
    loop = loop_kernels.kernel("walls", [S0, *result], [], {"x": "float32"}, {"y": "float32"}, body)
    y = torch.zeros(1, *result)
    run(language, loop, {"x": x, "y": y}, {"s0": 1})
    expected = x[0].T if turned else x[0]
    pads = (-start[1], -start[1], -start[0], -start[0])
    assert torch.equal(y[0], F.pad(expected, pads, value=-2.5))
