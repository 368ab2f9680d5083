"""Random graphs through the whole path, forward and gradients, against float64."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.fuzz import _compare, _run, compared, failures
from tests.support.random_models import Several

COUNT, BATCH = 200, 10
# A batch is traced again if one of its outputs is a view, and twice if one of its sizes is not
# dynamic. Such graphs are grouped, or most batches would be traced again.
VIEWS = (18, 27, 30, 89, 98, 102, 114, 115, 116, 118, 148, 186)
FIXED = (19, 37, 72, 127)


def batches() -> list[tuple[int, ...]]:
    plain = [seed for seed in range(COUNT) if seed not in {*VIEWS, *FIXED}]
    return [FIXED, VIEWS, *(tuple(plain[at : at + BATCH]) for at in range(0, len(plain), BATCH))]


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(seeds, marks=[pytest.mark.as_users_build] if number % 5 == 0 else [])
        for number, seeds in enumerate(batches())
    ],
    ids=lambda seeds: f"{min(seeds)}-{max(seeds)}",
)
def test_random_graphs(seeds: tuple[int, ...]) -> None:
    assert failures(list(seeds)) == []


def test_every_graph_is_in_one_batch() -> None:
    assert sorted(seed for seeds in batches() for seed in seeds) == list(range(COUNT))


def test_a_wrong_gradient_is_noticed() -> None:
    """The comparison can fail: a result that is off by one part in a thousand does."""
    truth = torch.randn(100, dtype=torch.float64)
    assert _compare((truth * 1.001).float(), (truth.float(), truth))
    assert not _compare(truth.float(), (truth.float(), truth))


# |s| / max(|s|, ε) of one sum s, whose gradient g / s - g · (1 / s) is zero but for rounding.
CANCELLED = 962


def test_a_sum_in_another_order_is_no_failure() -> None:
    """Eager's gradient may be exactly zero; a sum in another order is not."""
    model = Several([0, 1, CANCELLED])
    turned = [_run(_turned(model, by), model.inputs()) for by in range(33)]
    farthest = max(turned, key=lambda record: record[2]["grad weight 0"].abs().max().item())
    assert farthest[2]["grad weight 0"].abs().max() > 1e-6
    assert compared(farthest, model, model.inputs()) == []


def _turned(model: Several, by: int) -> Several:
    turned = copy.deepcopy(model)
    weight = turned.parts[2].weights[0]
    weight.data = weight.data.roll(by)
    return turned


@pytest.mark.parametrize("name", ["output 0", "grad input 0", "grad weight 0", "grad weight 1"])
def test_neighbours_excuse_no_wrong_result(name: str) -> None:
    model = Several([0, 1, CANCELLED])
    ours = _run(copy.deepcopy(model), model.inputs())
    ours[2][name] = ours[2][name] * 1.001 + 1e-4
    assert [each.what.split(":")[0] for each in compared(ours, model, model.inputs())] == [name]


# hypot of (3, 2, 2, 1) with strides (2, 0, 1, 1) and of (3, 2, 1, 1) with (2, 1, 1, 2): no operand
# has both dimensions of two, and eager goes by the last stride of the second.
UNORDERED = 736


@pytest.mark.parametrize("strides, right", [((4, 2, 1, 1), True), ((1, 6, 3, 1), False)])
def test_strides_that_no_element_uses_are_ignored(strides: tuple[int, ...], right: bool) -> None:
    model = Several([UNORDERED])
    record = _run(copy.deepcopy(model), model.inputs())
    result = record[0]["output 0"]
    record[0]["output 0"] = torch.empty_strided(result.shape, strides).copy_(result)
    assert (compared(record, model, model.inputs()) == []) == right
