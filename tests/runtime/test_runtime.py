"""The run time on hand-written programs: results, autograd, guards, compile, copies, DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusewright.compile.module import optimized
from fusewright.compile.owners import Modes
from fusewright.runtime import call
from tests.support.gradients import (
    medley_results,
    output_and_gradients,
    penalty,
    refuses_second_derivatives,
)
from tests.support.handmade import Case, gemm_add_relu, literal_sum, medley
from tests.support.tensors import assert_same


@pytest.fixture(scope="module")
def gemm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Modes]:
    case = gemm_add_relu()
    return case, case.modes(tmp_path_factory.mktemp("gemm"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Modes]:
    case = medley()
    return case, case.modes(tmp_path_factory.mktemp("medley"))


def refuse(*_: Any) -> Modes:
    raise AssertionError("no new program is needed here")


def pair(made: tuple[Case, Modes]) -> tuple[nn.Module, nn.Module]:
    """A fresh eager model and the optimized form of its copy."""
    eager = copy.deepcopy(made[0].model)
    return eager, optimized(copy.deepcopy(eager), made[1], refuse)


@pytest.mark.parametrize("rows", [0, 1, 4, 7])
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_are_eagers(gemm: Any, rows: int, training: bool) -> None:
    eager, fast = pair(gemm)
    eager.train(training), fast.train(training)
    x = torch.randn(rows, 3)
    theirs = output_and_gradients(eager, x.clone().requires_grad_())
    assert_same(output_and_gradients(fast, x.clone().requires_grad_()), theirs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(0.5).expand(6, 5),
        lambda: torch.randn(5, 6).t(),
        lambda: torch.randn(12, 10)[::2, 1::2],
        lambda: torch.randn(6, 5),
        lambda: torch._neg_view(torch.randn(6, 5)),
    ],
    ids=["expanded", "transposed", "sliced", "contiguous", "negated"],
)
def test_tangents_of_any_layout(gemm: Any, make: Callable[[], torch.Tensor]) -> None:
    eager, fast = pair(gemm)
    x, tangent = torch.randn(6, 3), make()
    theirs = output_and_gradients(eager, x.clone().requires_grad_(), tangent)
    assert_same(output_and_gradients(fast, x.clone().requires_grad_(), tangent), theirs)


@pytest.mark.parametrize("wanted", ["x", "gemm.weight", "bias"])
def test_unwanted_gradients_cost_nothing(
    gemm: Any, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, fast = pair(gemm)
    space = gemm[1][0].backward.__globals__
    bare, seen = space["custom_threshold_backward_sum"], []

    def watched(*args: Any, want: tuple[bool, ...]) -> Any:
        seen.append(want)
        return bare(*args, want=want)

    monkeypatch.setitem(space, "custom_threshold_backward_sum", watched)
    x = torch.randn(6, 3)
    for model in (eager, fast):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == wanted)
    theirs = output_and_gradients(eager, x.clone().requires_grad_(wanted == "x"))
    assert_same(output_and_gradients(fast, x.clone().requires_grad_(wanted == "x")), theirs)
    assert seen == [(wanted != "bias", wanted == "bias")]


def test_nothing_is_recorded_where_no_gradient_is_wanted(gemm: Any) -> None:
    eager, fast = pair(gemm)
    x = torch.randn(4, 3)
    with torch.no_grad():
        assert fast(x).grad_fn is None
        assert_same(fast(x), eager(x))
    with torch.inference_mode():
        assert fast(x).is_inference()
        assert_same(fast(x).clone(), eager(x))
    fast.requires_grad_(False)
    assert fast(x).grad_fn is None and not fast(x).requires_grad
    assert type(fast(x.requires_grad_()).grad_fn).__name__ == "_FwFunctionBackward"


def test_backward_twice_needs_retain_graph(gemm: Any) -> None:
    _, fast = pair(gemm)
    y = fast(torch.randn(4, 3)).sum()
    y.backward(retain_graph=True)
    first = fast.bias.grad.clone()
    y.backward()
    assert_same(fast.bias.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_a_gradient_to_be_differentiated_is_refused_at_once(gemm: Any) -> None:
    _, fast = pair(gemm)
    refuses_second_derivatives(fast)
    with pytest.raises(call._FwSecondDerivative):
        penalty(fast, torch.randn(4, 3))
    assert_same(torch.func.grad(lambda z: fast(z).sum())(x := torch.randn(4, 3)), gradient(fast, x))


def gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(model(x.requires_grad_()).sum(), x)[0]


def test_the_registered_operators_refuse_the_same(gemm: Any) -> None:
    _, fast = pair(gemm)
    torch._dynamo.reset()
    refuses_second_derivatives(torch.compile(fast, fullgraph=True, backend="eager"))


def test_saved_tensors_can_be_moved_and_recomputed(gemm: Any) -> None:
    eager, fast = pair(gemm)
    x = torch.randn(4, 3)
    theirs = output_and_gradients(eager, x.clone().requires_grad_())
    with torch.autograd.graph.save_on_cpu():
        assert_same(output_and_gradients(fast, x.clone().requires_grad_()), theirs)
    checkpoint = torch.utils.checkpoint.checkpoint
    mine = x.clone().requires_grad_()
    fast.zero_grad()
    checkpoint(fast, mine, use_reentrant=False).sum().backward()
    assert_same([mine.grad, fast.bias.grad], [theirs[1], theirs[2]])


def test_an_output_can_be_changed_in_place(gemm: Any) -> None:
    _, fast = pair(gemm)
    with torch.no_grad():
        y = fast(torch.randn(4, 3))
    assert_same(y.clone().mul_(2), y.mul_(2))


@pytest.mark.parametrize("training", [True, False])
def test_every_kind_of_output(mixed: Any, training: bool) -> None:
    eager, fast = pair(mixed)
    eager.train(training), fast.train(training)
    for rows in (4, 0, 9):
        x, index = torch.randn(rows, 3), torch.arange(rows)
        theirs = medley_results(eager, x.clone().requires_grad_(), index)
        mine = medley_results(fast, x.clone().requires_grad_(), index)
        assert mine["kinds"] == theirs["kinds"]
        assert mine["out"]["rows"] == rows and mine["out"]["none"] is None
        assert_same(mine.pop("out"), theirs.pop("out"))
        assert_same(mine, theirs)


def test_an_output_that_is_an_input_is_that_input(mixed: Any) -> None:
    _, fast = pair(mixed)
    x, index = torch.randn(4, 3, requires_grad=True), torch.arange(4)
    out = fast(x, index, True)
    assert out["again"][1] is x and out["index"] is index and out["again"][0] is out["y"]
    assert out["flat"]._base is x


def test_mutated_buffers_change_and_count_their_versions(mixed: Any) -> None:
    _, fast = pair(mixed)
    before = fast.count._version
    fast(torch.randn(4, 3), torch.arange(4), True)
    with torch.no_grad():
        fast(torch.randn(4, 3), torch.arange(4), True)
    assert int(fast.count) == 2 and fast.count._version == before + 2


def test_unused_outputs_have_zero_tangents(mixed: Any) -> None:
    eager, fast = pair(mixed)
    x, index = torch.randn(4, 3), torch.arange(4)
    grads = []
    for model in (eager, fast):
        mine = x.clone().requires_grad_()
        model(mine, index, True)["again"][0].sum().backward()
        grads.append([mine.grad, *[each.grad for each in model.parameters()]])
    assert_same(grads[1], grads[0])


def test_keywords_defaults_and_constants(mixed: Any) -> None:
    eager, fast = pair(mixed)
    x, index = torch.randn(4, 3), torch.arange(4)
    reason, out = call._fw_forward(mixed[1], fast, (), {"index": index, "flag": True, "x": x})
    assert reason is None
    assert_same(out["y"], eager(x, index)["y"])
    reason, _ = call._fw_forward(mixed[1], fast, (x, index, False), {})
    assert reason is not None and "tensor, False)" in reason


def test_an_output_is_differentiable_only_through_what_it_depends_on(gemm: Any) -> None:
    modes = tuple(type(each)(**vars(each) | {"reach": ((0, (1,)),)}) for each in gemm[1])
    fast = optimized(copy.deepcopy(gemm[0].model), modes, refuse).requires_grad_(False)
    x = torch.randn(4, 3, requires_grad=True)
    assert not fast(x).requires_grad
    fast.gemm.weight.requires_grad_()
    assert fast(x).requires_grad


def test_constants_of_the_graph_are_made_once_and_never_given_away(tmp_path: Path) -> None:
    case = literal_sum()
    fast = optimized(case.model, case.modes(tmp_path), refuse)
    x = torch.randn(4, 3, requires_grad=True)
    want = case.model(x)
    total, constant = fast(x)
    assert_same([total, constant], list(want))
    constant.zero_()
    assert_same(list(fast(x)), list(want))
    total.sum().backward()
    assert_same(x.grad, torch.ones(4, 3))
