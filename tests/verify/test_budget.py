"""What a check would take, and what there is."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from fusewright.compile.out_of_memory import is_out_of_memory
from fusewright.errors import ProblemError
from fusewright.verify import reuse
from fusewright.verify.budget import (
    Budget,
    Footprint,
    affordable_blocks,
    budget_of,
    counting_saved_tensors,
    deadline,
    footprint,
)
from fusewright.verify.feeds import Feed
from fusewright.verify.reuse import reusing
from fusewright.verify.scenarios import SCENARIOS

CPU = torch.device("cpu")


def test_there_is_some_memory() -> None:
    found = budget_of(CPU, 7.0)
    assert found.seconds == 7.0 and found.memory_bytes > 1e8
    assert budget_of(CPU).seconds == math.inf
    assert deadline(Budget()).left_s == math.inf
    assert deadline(Budget(seconds=0.0)).left_s == 0.0
    assert 0 < deadline(Budget(seconds=60.0)).left_s <= 60


def test_memory_errors_are_known_by_their_cause() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(None)
    try:
        try:
            raise torch.OutOfMemoryError("no")
        except RuntimeError as error:
            raise ProblemError("the model itself fails") from error
    except ProblemError as error:
        assert is_out_of_memory(error)
    assert not is_out_of_memory(ProblemError("out of memory"))


def test_what_forward_keeps_is_counted_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Sigmoid())
    x = torch.randn(10, 8, requires_grad=True)
    with counting_saved_tensors() as saved:
        y = model(x)
    sizes = saved.sizes((*model.parameters(), x))
    assert sorted(sizes) == [320, 320]  # the results of tanh and sigmoid
    found = footprint(model, (x,), {"output": y}, sizes)
    assert found == Footprint(320, 320, 320, 256, 640, 320)
    half = found.part(0.5)
    assert half == Footprint(160, 160, 160, 256, 320, 256)


def test_more_layouts_and_gradients_take_more_memory() -> None:
    training, forward = SCENARIOS[0], SCENARIOS[1]
    large = Footprint(1e9, 1e9, 1e9, 1e6, 2e9, 1e9)
    assert large.float64_bytes(training) > large.float64_bytes(forward) > 8e9
    # Measured: 25 to 29 times the input for a softmax on a CPU (134 MB: 3.67 GB).
    softmax = Footprint(134e6, 134e6, 134e6, 0, 134e6, 134e6)
    assert softmax.float64_bytes(training) == pytest.approx(3.67e9, rel=0.1)


def test_large_blocks_of_the_host_are_not_filled() -> None:
    blocks = ((CPU, torch.float32, 1 << 30), (CPU, torch.float32, 100))
    assert affordable_blocks(blocks) == ((CPU, torch.float32, 1), (CPU, torch.float32, 100))
    device = torch.device("cuda", 0)
    assert affordable_blocks(((device, torch.float32, 1 << 30),)) == (
        (device, torch.float32, 1 << 30),
    )


def test_a_feed_without_originals_still_has_values() -> None:
    x = torch.randn(5, 3)
    feed = Feed(((x,),), seed=0)
    feed.release()
    (held,) = feed.values(0)
    assert isinstance(held, torch.Tensor) and torch.equal(held, x) and not held.requires_grad
    (mine,) = feed.slots[0]
    assert mine.data_ptr() != held.data_ptr() != x.data_ptr()
    assert feed.masters[0][0].data_ptr() == mine.data_ptr()


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise TypeError("cannot pickle")


@pytest.mark.parametrize("kind", [nn.Linear, Uncopied])
@pytest.mark.parametrize("large", [True, False])
def test_large_models_are_made_once(
    kind: type[nn.Linear], large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse, "_LARGE_BYTES", 100 if large else 10**9)
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(kind(6, 6))
        return made[-1]

    again = reusing(make, CPU)
    first = again()
    with torch.no_grad():
        before = copy.copy(dict(first.state_dict()))["weight"].clone()
        for each in first.parameters():
            each.zero_()
    second, third = again(), again()
    once = large and kind is nn.Linear
    assert len(made) == (1 if once else 3)
    assert len({id(each) for each in (first, second, third)}) == 3
    assert torch.equal(second.state_dict()["weight"], before) == once
