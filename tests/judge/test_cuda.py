"""The launcher of a GPU, with the host in the device's place and a clock that keeps a diary."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fusewright.judge.arena import Arena
from fusewright.judge.conversation import Reply
from fusewright.judge.cuda import Cuda
from fusewright.judge.guarded import room
from fusewright.judge.hearing import Hearing
from fusewright.judge.launcher import Launcher
from fusewright.judge.placement import Placement, piece_of
from fusewright.judge.race import fault_of_time, hidden_s, seconds_of
from fusewright.judge.times import CANDIDATE, PassTimes, times_of
from fusewright.judge.wire import BadMessage, bytes_of

HOST = torch.device("cpu")


class Diary:
    """Each mark is the number of entries so far."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def drain(self) -> None:
        self.entries.append("drain")

    def mark(self) -> int:
        self.entries.append("mark")
        return len(self.entries)

    def elapsed_us(self, first: object, last: object) -> float:
        return float(last - first)  # type: ignore[operator]

    def forget(self, moment: object) -> None:
        assert isinstance(moment, int)


class Doubled(nn.Module):
    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self._diary = diary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._diary.entries.append(f"call with {float(x[0, 0].detach()):g}")
        return x * self.weight


def test_a_call_is_timed_between_drained_streams() -> None:
    """Values come to the candidate's memory after the clock has started, and go back afterwards."""
    diary, arena = Diary(), Arena.new(1 << 16, 1 << 16)
    device = Cuda(HOST, diary, lambda: diary.entries.append("flush"))
    launcher = Launcher(arena, device)
    launcher.model = Doubled(diary)
    weight = {"tensor": 0, "dtype": "float32", "shape": [2], "device": "cpu"}
    launcher.answer(
        {"do": "weights", "values": {"weight": weight}, "attributes": {}},
        [bytes_of(torch.tensor([5.0, 7.0]))],
    )
    placement = Placement(arena, random.Random(0))
    values, tangent = torch.full((3, 2), 4.0), torch.ones(3, 2)
    pieces = [piece_of(0, (0, "x"), values), piece_of(0, (0, "gradient of output"), tangent)]
    placement.assign(pieces, "fresh")
    pieces[0].node["grad"] = True
    call = {
        "inputs": [pieces[0].node],
        "tangents": {"output": pieces[1].node},
        "seed": 1,
        "how": "grad",
        "place": "fresh",
        "slot": 0,
    }
    request = {
        "do": "prepare",
        "id": 1,
        "mode": "train",
        "gradients": True,
        "twice": False,
        "aside": False,
        "part": "",
        "detached": [],
        "keep": False,
        "poison": True,
        "busy": False,
        "empty": False,
        "trace": False,
        "again": False,
        "weigh": False,
        "frozen": [],
        "calls": [call],
        "buffers": {},
        "attributes": {},
    }
    ready, _ = launcher.answer(request, [])
    assert "error" not in ready, ready
    placement.write()
    given = launcher.calls[0].inputs["x"]
    shared = arena.bytes_at(pieces[0].node["offset"], 1)
    assert given.data_ptr() != shared.data_ptr() + 4096
    done, sent = launcher.answer({"do": "go"}, [])
    assert "error" not in done and not sent, done
    assert diary.entries == [
        "flush",
        "drain",
        "mark",
        "call with 4",
        "mark",
        "mark",
        "drain",
        "mark",
        "drain",
    ]
    # The copies of the results, between the second and the third mark, do not count.
    assert done["device"] == {"stream_us": 2.0, "device_us": 4.0}
    output, grad_x, grad_weight = arena.taken(done["placed"])
    assert output == bytes_of(values * torch.tensor([5.0, 7.0]))
    assert grad_x == bytes_of(torch.tensor([5.0, 7.0]).expand(3, 2))
    assert grad_weight == bytes_of(torch.tensor([12.0, 12.0]))
    with torch.no_grad():
        given[1, 1] = 0.0  # a kernel that writes into its input
    report, _ = launcher.answer({"do": "report"}, [])
    assert report["damaged"] == [] and list(dict(placement.changed(0))) == ["x"]
    behind = torch.as_strided(given.detach(), (1,), (1,), given.storage_offset() + 6)
    behind.zero_()
    launcher.answer({"do": "report"}, [])
    assert placement.damaged() == ["input x"]
    assert room(pieces[0].form) > 8192
    arena.close()


@pytest.mark.parametrize(
    ("stream_us", "device_us", "counted_us"),
    [(1000.0, 1010.0, 1000.0), (1000.0, 3000.0, 3000.0), (10.0, 40.0, 10.0)],
)
def test_work_on_other_streams_counts(
    stream_us: float, device_us: float, counted_us: float
) -> None:
    header = {"device": {"stream_us": stream_us, "device_us": device_us}}
    assert seconds_of(Reply(header, {}, (), (), 5e-3)) == pytest.approx(counted_us * 1e-6)


def test_a_write_beside_a_result_is_seen() -> None:
    device = Cuda(HOST, Diary(), lambda: None)
    device._sizes = (768, 4 << 20)
    device.poison(True)
    assert device.damaged() == [] and len(device._zones) == 4
    device._zones[1][5] = 0
    assert device.damaged() == ["a result"]
    device.poison(False)
    assert device.damaged() == []


@pytest.mark.parametrize(
    ("told_us", "waited_us", "is_hidden"),
    [(400.0, 3400.0, False), (400.0, 9000.0, True), (9000.0, 12000.0, False), (8.0, 3200.0, False)],
)
def test_the_judges_clock_bounds_the_time_of_a_device(
    told_us: float, waited_us: float, is_hidden: bool
) -> None:
    """An empty request takes 3 ms; one in eight takes ten times as long, on a busy host."""
    slow = [1.0] * 7 + [10.0]
    waits = {CANDIDATE: [waited_us * e for e in slow], "empty": [3000.0 * e for e in slow]}
    samples = {CANDIDATE: [told_us * 1e-6] * 8, "empty": [5e-6] * 8}
    hidden_us = hidden_s(samples, {n: [e * 1e-6 for e in w] for n, w in waits.items()}) * 1e6
    times = (times_of(CANDIDATE, [told_us] * 8),)
    found = PassTimes("forward", "eval", 8, 1, 5.0, 1.0, times, (), hidden_us=hidden_us)
    fault = fault_of_time(found)
    assert (fault is not None and fault.word == "dishonest") == is_hidden


@pytest.mark.parametrize("times", [(-1.0, 5.0), (9.0, 5.0), (5.0, 1e5), ("x", 1.0)])
def test_a_time_that_the_parents_clock_refutes(times: tuple[object, object]) -> None:
    header = {"device": {"stream_us": times[0], "device_us": times[1]}}
    with pytest.raises(BadMessage):
        seconds_of(Reply(header, {}, (), (), 5e-3))


def test_memory_that_calls_leave_behind_is_not_asked_on_a_gpu() -> None:
    """The driver takes memory of the host, so honest kernels would be flagged."""
    hearing = object.__new__(Hearing)
    hearing.process = SimpleNamespace(device="cuda")  # type: ignore[assignment]
    hearing.flags = {}
    asked: list[object] = []
    hearing._examine = asked.append  # type: ignore[assignment, method-assign]
    hearing._look_for_leaks(("train",))
    assert not asked and not hearing.flags
