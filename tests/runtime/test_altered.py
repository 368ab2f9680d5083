"""A model that changes after its capture: no change of its result goes unnoticed."""

from __future__ import annotations

import copy
import gc
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fusewright
from fusewright.compile.engine import MOST_VALUES
from fusewright.errors import DeviceError
from tests.support.altered_models import CHANGES, eager_result, is_fused, lambdas, set_to
from tests.support.tensors import assert_same, default_dtype


class Other(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 5


Other.__name__ = Other.__qualname__ = "Scale"  # as when a notebook cell defines the class again


# The emitted file records names. Only the objects show that these differ.
IN_A_PROGRAM_ALONE: dict[str, Callable[[nn.Module], Any]] = {
    "a class of the same name": lambda m: m.list.__setitem__(0, Other()),
    "a lambda of the same name": set_to("act", lambda x: x * 3),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", [*CHANGES, *IN_A_PROGRAM_ALONE])
def test_a_program_is_compiled_again(program: nn.Module, change: str) -> None:
    fast, x = copy.deepcopy(program), torch.randn(4, 3)
    if "lambda" in change:
        IN_A_PROGRAM_ALONE[change] = set_to("act", lambdas()[1])
    before = fast(x)
    assert_same(fast(x), before)
    {**CHANGES, **IN_A_PROGRAM_ALONE}[change](fast)
    wanted = eager_result(fast, x)
    assert not torch.equal(wanted.float(), before)
    for _ in range(2):
        assert_same(fast(x), wanted)
    assert_same(copy.deepcopy(program)(x), before)


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_runs_the_original_and_says_so_once(
    file: Callable[[], nn.Module], change: str
) -> None:
    fast, x = file(), torch.randn(4, 3)
    assert is_fused(fast, x)
    before = fast(x)
    CHANGES[change](fast)
    with pytest.warns(RuntimeWarning, match="the original forward runs") as caught:
        found = fast(x)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(fast(x), found)
    assert_same(found, eager_result(fast, x))
    assert not torch.equal(found.float(), before) and is_fused(file(), x)


def test_one_patch_replaced_by_another(program: nn.Module) -> None:
    fast, x = copy.deepcopy(program), torch.randn(4, 3)
    for factor in (7, 8):
        times = types.FunctionType(patch.__code__, {"factor": factor})
        fast.a.forward = types.MethodType(times, fast.a)
        assert_same(fast(x), eager_result(fast, x))


def patch(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * factor  # type: ignore[name-defined]  # noqa: F821


def test_an_attribute_that_changes_every_time_is_not_followed(program: nn.Module) -> None:
    fast, x = copy.deepcopy(program), torch.randn(4, 3)
    before = len(fast._fw_engine.modes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2 * MOST_VALUES):
            fast.scales.append(float(step))
            assert_same(fast(x), eager_result(fast, x))
    assert len(fast._fw_engine.modes) == before + MOST_VALUES
    assert [str(each.message)[:50] for each in caught] == [
        "the original forward runs: attribute scales is not"
    ]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_layer_with_pytorchs_own_parametrisation_stays_fused() -> None:
    wrapped = [nn.utils.weight_norm(nn.Linear(3, 3)), nn.utils.spectral_norm(nn.Linear(3, 3))]
    prune.l1_unstructured(pruned := nn.Linear(3, 3), "weight", 0.5)
    model, x = nn.Sequential(*wrapped, pruned, nn.Tanh()).eval(), torch.randn(4, 3)
    fast, wanted = fusewright.optimize(model, x, modes=("eval",)), model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_fused(fast, x)
        assert_same(fast(x), wanted)
        assert_same(model(x), wanted)  # which computes the weights again
        assert is_fused(fast, x)
        programs = len(fast._fw_engine.modes)
        prune.remove(fast[2], "weight")
        nn.utils.remove_weight_norm(fast[0])
        assert_same(fast(x), wanted)
    assert len(fast._fw_engine.modes) == programs + 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("layer", ["weight_norm", "spectral_norm", "pruned"])
def test_a_parameter_in_place_of_what_a_hook_sets_fails_as_in_eager_mode(layer: str) -> None:
    def made() -> nn.Module:
        linear = nn.Linear(3, 3)
        if layer == "pruned":
            prune.l1_unstructured(linear, "weight", 0.5)
        else:
            getattr(nn.utils, layer)(linear)
        return nn.Sequential(linear, nn.Tanh()).eval()

    x = torch.randn(4, 3)
    for model in (made(), fusewright.optimize(made(), x, modes=("eval",))):
        model(x)
        model[0].weight = nn.Parameter(torch.ones(3, 3))
        with pytest.raises(TypeError, match=r"cannot assign .* as parameter 'weight'"):
            model(x)


def test_a_changed_default_dtype_is_noticed(
    program: nn.Module, file: Callable[[], nn.Module]
) -> None:
    x = torch.randn(4, 3)
    for fast in (copy.deepcopy(program), file()):
        assert fast(x).dtype is torch.float32
        with default_dtype(torch.float64), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert fast(x).dtype is torch.float64
            assert_same(fast(x), eager_result(fast, x))
        assert is_fused(fast, x)


class Shifted(nn.Module):
    def forward(self, x: torch.Tensor, by: np.ndarray[Any, Any]) -> torch.Tensor:
        return x + float(by[1000])


def test_arrays_are_compared_by_all_their_elements() -> None:
    x, by = torch.randn(4, 3), np.zeros(2000)
    fast = fusewright.optimize(Shifted(), (x, by), modes=("train",))
    assert_same(fast(x, by), x)
    by[1000] = 3
    assert_same(fast(x, by), x + 3)


class Settings:
    factor = 2.0


class Told(nn.Module):
    def forward(self, x: torch.Tensor, how: Any) -> torch.Tensor:
        return x * how.factor if isinstance(how, Settings) else how(x)


def test_objects_with_no_value_to_compare_are_left_to_dynamo() -> None:
    x, how = torch.randn(4, 3), Settings()
    for example in (how, lambda x: x * 2):
        fast = fusewright.optimize(Told(), (x, example), modes=("train",))
        for factor in range(1, 5):
            how.factor = factor
            assert_same(fast(x, how), x * factor)
        for factor in range(1, 5):
            assert_same(fast(x, lambda x, k=factor: x * k), x * factor)


def test_the_meta_device_runs_the_original() -> None:
    model, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh()), torch.randn(4, 3, device="meta")
    fast = fusewright.optimize(model, torch.randn(4, 3), modes=("train",))
    with pytest.warns(RuntimeWarning, match="not on a cpu device") as caught:
        found = fast.to("meta")(x)
    assert len(caught) == 1 and found.device.type == "meta" and found.shape == (4, 5)
    with pytest.raises(DeviceError, match="meta"):
        fusewright.optimize(model, x)


def test_a_module_is_freed_with_its_last_reference(file: Callable[[], nn.Module]) -> None:
    fast = file()
    fast(torch.randn(4, 3))
    gone = weakref.ref(fast)
    gc.disable()
    try:
        del fast
        assert gone() is None
    finally:
        gc.enable()


def test_tied_layers_that_become_separate() -> None:
    tied = nn.Linear(3, 3)
    model, x = nn.Sequential(tied, nn.Tanh(), tied), torch.randn(4, 3)
    fast = fusewright.optimize(model, x, modes=("train",))
    assert_same(fast(x), eager_result(fast, x))
    fast[2] = nn.Linear(3, 3)
    assert_same(fast(x), eager_result(fast, x))
    fast[2] = tied
    assert_same(fast(x), eager_result(fast, x))
    fast[2] = other = nn.Linear(3, 3)
    other.weight = tied.weight
    assert_same(fast(x), eager_result(fast, x))
    other.weight = nn.Parameter(torch.ones(3, 3))
    assert_same(fast(x), eager_result(fast, x))


class Hollow(nn.Module):
    """Empty containers are false, and still count as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.line, self.weights = nn.ModuleList(), nn.Sequential(), nn.ParameterList()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.none:
            x = each(x)
        return torch.relu(self.lin(self.line(x)))


def test_empty_containers_are_no_change() -> None:
    x = torch.randn(4, 3)
    fast = fusewright.optimize(Hollow(), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = fast(x), fast.eval()(x)
    assert_same(first, second)
    fast.none.append(nn.Tanh())
    assert_same(fast(x), Hollow.forward(fast, x))
