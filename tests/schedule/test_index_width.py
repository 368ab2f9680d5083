"""Vectors with 64-bit offsets are compiled where a batch like the example's may need them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import loop_kernels
from fusewright.ir.graph import Dim
from fusewright.ir.loop import Load, LoopKernel, Store
from fusewright.kinds.registry import render
from fusewright.schedule.choice import Schedule
from fusewright.schedule.index_width import GROWTH, NARROW_LIMIT, extents, may_be_wide
from fusewright.schedule.loops import choose
from fusewright.target.target import Target

S0 = Dim(1, ("s0",))
CUDA = Target.cuda()
EDGE = NARROW_LIMIT // GROWTH // 1024  # rows of 1024: offsets are said to be up to one row further


def instances(loop: LoopKernel, schedule: Schedule) -> list[tuple[str, int]]:
    """The types of offsets and the lanes, in the order in which an entry would take them."""
    text = render([(loop, schedule)], CUDA).text.replace("return fw::kRare;", "")
    calls = text[text.index(f"FW_ENTRY({loop.name},") :].split("return fw::")[1:]
    numbers = [call[call.index("<") + 1 :].split(",")[:2] for call in calls]
    return [(index, int(lanes)) for index, lanes in numbers]


@pytest.mark.parametrize(
    "make", [loop_kernels.bias_relu, loop_kernels.softmax, loop_kernels.column_sum]
)
@pytest.mark.parametrize(("rows", "wide"), [(8, False), (EDGE - 2, False), (EDGE, True)])
def test_the_example_decides(make: object, rows: int, wide: bool) -> None:
    assert callable(make)
    loop = make(S0, 1024)
    schedule = choose(loop, CUDA, {"s0": rows})
    assert schedule.lanes > 1 and schedule.wide_index == wide == may_be_wide(loop, {"s0": rows})
    between = [("int64_t", schedule.lanes)] if wide else []
    expected = [("int", schedule.lanes), *between, ("int64_t", 1)]
    assert instances(loop, schedule) == expected


@pytest.mark.parametrize("wide", [False, True])
def test_sizes_that_stay_need_no_choice(wide: bool) -> None:
    for rows, index in ((8, "int"), (2**22, "int64_t")):
        loop = loop_kernels.bias_relu(rows, 1024)
        schedule = replace(choose(loop, CUDA, {}), wide_index=wide)
        assert instances(loop, schedule) == [(index, schedule.lanes), (index, 1)]


@pytest.mark.parametrize("wide", [False, True])
def test_single_elements_need_no_vectors(wide: bool) -> None:
    schedule = Schedule("pointwise", lanes=1, wide_index=wide)
    assert instances(loop_kernels.add_relu(S0), schedule) == [("int", 1), ("int64_t", 1)]


def test_strided_elements_count_by_their_distance() -> None:
    """Few elements, each far from the one before."""
    load = Load("x", "float32", loop_kernels.access("x", 2**24))
    store = Store("x", "float32", loop_kernels.access("y", 1))
    loop = loop_kernels.kernel("far", [S0], [], {"x": "float32"}, {"y": "float32"}, [load, store])
    assert max(sum(term.at({"s0": 9}) for term in terms) for terms in extents(loop)) == 9 * 2**24
    assert not may_be_wide(loop, {"s0": 7})
    assert may_be_wide(loop, {"s0": 8})


def test_the_host_has_one_width() -> None:
    assert not choose(loop_kernels.bias_relu(S0, 1024), Target.host(), {"s0": 2**22}).wide_index
