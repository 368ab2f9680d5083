"""Calls that a kernel writer forgets: each gives eager's result or eager's error.

The model and its table of inputs are those of test_bad_inputs.py. `DOCUMENTED` are those where ours
is the error that README.md names.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusewright.runtime.call import _FwSecondDerivative
from tests.support.beside_eager import COLUMNS, Pair, answer, assert_alike, pair, randn, trained


@pytest.fixture(name="pair", scope="module")
def fixture() -> Pair:
    return pair()


def x_of(requires_grad: bool = True) -> Tensor:
    return randn(6, COLUMNS).requires_grad_(requires_grad)


def without_gradients(module: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [module(x_of())]


def in_inference_mode(module: nn.Module) -> list[Tensor]:
    with torch.inference_mode():
        return [module(x_of(False)).clone()]


def for_the_input_alone(module: nn.Module) -> list[Tensor]:
    x = x_of()
    return list(torch.autograd.grad(module(x).sum(), x))


def for_one_parameter(module: nn.Module) -> list[Tensor]:
    scale = module.get_parameter("scale")
    return list(torch.autograd.grad(module(x_of(False)).sum(), scale))


def backward_twice(module: nn.Module) -> list[Tensor]:
    x = x_of()
    y = module(x).square().sum()
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad is not None
    return [x.grad]


def backward_again(module: nn.Module) -> list[Tensor]:
    y = module(x_of()).sum()
    y.backward()
    y.backward()
    return []


def change_of_a_saved_value(module: nn.Module) -> list[Tensor]:
    x = x_of() * 1
    y = module(x)
    x.add_(1)
    y.sum().backward()
    return []


def change_of_the_result(module: nn.Module) -> list[Tensor]:
    x = x_of()
    y = module(x)
    y.mul_(2)
    y.sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def two_calls_then_two_backwards(module: nn.Module) -> list[Tensor]:
    a, b = x_of(), x_of(False).flip(0).requires_grad_()
    first, second = module(a), module(b)
    second.sum().backward()
    first.square().sum().backward()
    assert a.grad is not None and b.grad is not None
    return [a.grad, b.grad]


def checkpointed(module: nn.Module) -> list[Tensor]:
    x = x_of()
    checkpoint(module, x, use_reentrant=False).square().sum().backward()
    assert x.grad is not None
    return [x.grad]


def with_a_hook(module: nn.Module) -> list[Tensor]:
    handle = module.register_forward_hook(lambda each, given, made: made * 3)
    try:
        return [module(x_of()).detach()]
    finally:
        handle.remove()


def with_a_hook_inside(module: nn.Module) -> list[Tensor]:
    linear = module.get_submodule("linear")
    handle = linear.register_forward_hook(lambda each, given, made: made * 3)
    try:
        return [module(x_of()).detach()]
    finally:
        handle.remove()


def copied(module: nn.Module) -> list[Tensor]:
    return trained(copy.deepcopy(module), x_of())


def pickled(module: nn.Module) -> list[Tensor]:
    memory = io.BytesIO()
    torch.save(module.state_dict(), memory)
    memory.seek(0)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for each in twin.parameters():
            each.zero_()
    twin.load_state_dict(torch.load(memory))
    return trained(twin, x_of())


def in_double_precision(module: nn.Module) -> list[Tensor]:
    return trained(copy.deepcopy(module).double(), x_of().double())


def frozen(module: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(module)
    twin.get_submodule("linear").requires_grad_(False)
    return trained(twin, x_of())


def in_eval_mode(module: nn.Module) -> list[Tensor]:
    return trained(copy.deepcopy(module).eval(), x_of())


def with_shared_parameters(module: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(module)
    twin.register_parameter("scale", twin.get_parameter("linear.bias"))
    return trained(twin, x_of())


def by_vmap(module: nn.Module) -> list[Tensor]:
    return [torch.vmap(module)(randn(3, 6, COLUMNS)).detach()]


def by_jvp(module: nn.Module) -> list[Tensor]:
    made = torch.func.jvp(module, (randn(6, COLUMNS),), (randn(6, COLUMNS),))
    return [each.detach() for each in made]


def under_autocast(module: nn.Module) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return [module(x_of()).detach()]


def a_second_derivative(module: nn.Module) -> list[Tensor]:
    x = x_of()
    (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    return list(torch.autograd.grad(first.sum(), x))


def with_a_hook_on_the_input(module: nn.Module) -> list[Tensor]:
    x = x_of()
    x.register_hook(lambda gradient: gradient * 2)
    module(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad]


def with_a_hook_on_a_parameter(module: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(module)
    scale = twin.get_parameter("scale")
    scale.register_hook(lambda gradient: gradient * 2)
    scale.register_post_accumulate_grad_hook(lambda each: each.grad.add_(1))
    twin(x_of()).square().sum().backward()
    assert scale.grad is not None
    return [scale.grad]


def with_a_backward_hook(module: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(module)
    twin.register_full_backward_hook(lambda each, made, given: (made[0] * 3,))
    return trained(twin, x_of())


def gradients_that_add_up(module: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(module)
    for _ in range(3):
        twin(x_of(False)).square().sum().backward()
    return [each.grad for each in twin.parameters() if each.grad is not None]


def a_gradient_that_is_kept(module: nn.Module) -> list[Tensor]:
    x = x_of() * 2
    x.retain_grad()
    module(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad]


def a_parameter_that_changes_before_backward(module: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(module)
    y = twin(x_of())
    with torch.no_grad():
        twin.get_parameter("linear.weight").add_(1)
    y.sum().backward()
    return []


def a_parameter_as_the_input(module: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(module)
    weight = twin.get_parameter("linear.weight")
    twin(weight).square().sum().backward()
    assert weight.grad is not None
    return [weight.grad]


def a_parameter_of_another_shape(module: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(module)
    twin.register_parameter("scale", nn.Parameter(torch.tensor(0.7)))
    return trained(twin, x_of())


def a_parameter_that_is_gone(module: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(module)
    del twin._parameters["scale"]
    return trained(twin, x_of())


def saved_tensors_elsewhere(module: nn.Module) -> list[Tensor]:
    with torch.autograd.graph.save_on_cpu():
        return trained(module, x_of())


def with_anomalies_detected(module: nn.Module) -> list[Tensor]:
    with torch.autograd.detect_anomaly(check_nan=True):
        return trained(module, x_of() / 0)


def as_a_whole_pickle(module: nn.Module) -> list[Tensor]:
    return trained(pickle.loads(pickle.dumps(module)), x_of())


def with_state_that_does_not_fit(module: nn.Module) -> list[Tensor]:
    state = {**module.state_dict(), "scale": torch.ones(COLUMNS + 1)}
    copy.deepcopy(module).load_state_dict(state)
    return []


def in_16_bits(module: nn.Module) -> list[Tensor]:
    return trained(copy.deepcopy(module).bfloat16(), x_of().bfloat16())


def parameters_of_another_dtype(module: nn.Module) -> list[Tensor]:
    return trained(copy.deepcopy(module).double(), x_of())


def moved_to_meta(module: nn.Module) -> list[Tensor]:
    return [copy.deepcopy(module).to("meta")(x_of().to("meta")).detach()]


def parameters_on_meta(module: nn.Module) -> list[Tensor]:
    return [copy.deepcopy(module).to("meta")(x_of()).detach()]


def trained_then_evaluated(module: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(module)
    found = trained(twin.train(), x_of())
    with torch.no_grad():
        return [*found, twin.eval()(x_of()), twin.train()(x_of())]


def after_a_step(module: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(module)
    descent = torch.optim.SGD(twin.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        descent.zero_grad()
        twin(x_of(False)).square().sum().backward()
        descent.step()
    return trained(twin, x_of())


def called_with_other_parameters(module: nn.Module) -> list[Tensor]:
    others = {name: each.detach() * 2 for name, each in module.named_parameters()}
    return [torch.func.functional_call(module, others, (x_of(False),)).detach()]


def gradients_of_each_row(module: nn.Module) -> list[Tensor]:
    return [torch.vmap(torch.func.grad(lambda row: module(row[None]).square().sum()))(x_of(False))]


def compiled(module: nn.Module) -> list[Tensor]:
    torch._dynamo.reset()
    return trained(torch.compile(module, backend="aot_eager"), x_of())


def exported(module: nn.Module) -> list[Tensor]:
    program = torch.export.export(copy.deepcopy(module), (x_of(False),))
    return [program.module()(x_of(False)).detach()]


def by_name(module: nn.Module) -> list[Tensor]:
    return [module(x=x_of()).detach()]


def without_arguments(module: nn.Module) -> list[Tensor]:
    return [module()]


def with_an_argument_too_many(module: nn.Module) -> list[Tensor]:
    return [module(x_of(), 1)]


def with_a_list(module: nn.Module) -> list[Tensor]:
    return [module(x_of().tolist())]


def with_none(module: nn.Module) -> list[Tensor]:
    return [module(None)]


def with_a_parameter_for_x(module: nn.Module) -> list[Tensor]:
    x = nn.Parameter(x_of().detach())
    module(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad]


def in_double_by_default(module: nn.Module) -> list[Tensor]:
    torch.set_default_dtype(torch.float64)
    try:
        return trained(module, x_of())
    finally:
        torch.set_default_dtype(torch.float32)


def in_eight_threads(module: nn.Module) -> list[Tensor]:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda rows: trained(module, randn(rows, COLUMNS)), range(1, 17)))
    return [each for one in found for each in one[:2]]


WAYS = (
    without_gradients, in_inference_mode, for_the_input_alone, for_one_parameter, backward_twice,
    backward_again, change_of_a_saved_value, change_of_the_result, two_calls_then_two_backwards,
    checkpointed, with_a_hook, with_a_hook_inside, copied, pickled, in_double_precision, frozen,
    in_eval_mode, with_shared_parameters, by_vmap, by_jvp, under_autocast,
    a_second_derivative, with_a_hook_on_the_input, with_a_hook_on_a_parameter,
    with_a_backward_hook, gradients_that_add_up, a_gradient_that_is_kept,
    a_parameter_that_changes_before_backward, a_parameter_as_the_input,
    a_parameter_of_another_shape, a_parameter_that_is_gone, saved_tensors_elsewhere,
    with_anomalies_detected, as_a_whole_pickle, with_state_that_does_not_fit, in_16_bits,
    parameters_of_another_dtype, moved_to_meta, parameters_on_meta, trained_then_evaluated,
    after_a_step, called_with_other_parameters, gradients_of_each_row, compiled, exported, by_name,
    without_arguments, with_an_argument_too_many, with_a_list, with_none, with_a_parameter_for_x,
    in_double_by_default, in_eight_threads,
)  # fmt: skip

# Where eager has a result: README.md, "Limits".
DOCUMENTED = {"a_second_derivative": _FwSecondDerivative}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ways_to_call_give_what_eager_gives(pair: Pair, way: Callable[..., Any]) -> None:
    model, fast = pair
    expected = answer(lambda: way(model))
    found = answer(lambda: way(fast))
    if way.__name__ in DOCUMENTED:
        assert found is DOCUMENTED[way.__name__]
    else:
        assert_alike(found, expected)
