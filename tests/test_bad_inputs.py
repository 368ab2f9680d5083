"""Inputs that a kernel writer forgets: each gives eager's result or eager's error.

One model meets them all: a pointwise chain, a matmul, a reduction over rows and a broadcast. What
needs other machinery, such as processes, full disks or GPUs, has tests of its own.
"""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusewright

COLUMNS = 8


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, COLUMNS)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x)) * self.scale
        return (y - y.mean(-1, keepdim=True)) * torch.tanh(x)


Pair = tuple[nn.Module, nn.Module]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """The model and the optimized one, with parameters of its own."""
    torch.manual_seed(0)
    model = Chain()
    yield model, fusewright.optimize(copy.deepcopy(model), torch.randn(6, COLUMNS))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def moved_by(elements: int) -> Tensor:
    """Rows that begin a few elements behind an aligned address."""
    return randn(100)[elements : elements + 6 * COLUMNS].view(6, COLUMNS)


def overlapping() -> Tensor:
    return randn(40).as_strided((6, COLUMNS), (3, 1))


def filled(value: float) -> Tensor:
    x = randn(6, COLUMNS)
    x[1, 2] = x[4, 7] = value
    return x


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: randn(COLUMNS, 6).t(),
    "rows left out": lambda: randn(12, COLUMNS)[::2],
    "columns left out": lambda: randn(6, 2 * COLUMNS)[:, ::2],
    "columns cut": lambda: randn(6, COLUMNS + 3)[:, 1 : COLUMNS + 1],
    "expanded rows": lambda: randn(1, COLUMNS).expand(6, COLUMNS),
    "expanded columns": lambda: randn(6, 1).expand(6, COLUMNS),
    "a storage offset": lambda: randn(9, COLUMNS)[3:],
    "misaligned by one": lambda: moved_by(1),
    "misaligned by two": lambda: moved_by(2),
    "misaligned by four": lambda: moved_by(4),
    "overlapping": overlapping,
    "flipped": lambda: randn(6, COLUMNS).flip(0),
    "three dimensions, permuted": lambda: randn(COLUMNS, 2, 3).permute(1, 2, 0),
    "channels-last": lambda: randn(2, 3, 4, COLUMNS).contiguous(memory_format=torch.channels_last),
    "channels-last 3d": lambda: randn(2, 3, 2, 2, COLUMNS).contiguous(
        memory_format=torch.channels_last_3d
    ),
    "nine dimensions": lambda: randn(1, 2, 1, 2, 1, 1, 2, 1, COLUMNS),
    "a negative view": lambda: torch.complex(randn(6, COLUMNS), randn(6, COLUMNS)).conj().imag,
}
SIZES: dict[str, Callable[[], Tensor]] = {
    "no rows": lambda: randn(0, COLUMNS),
    "one row": lambda: randn(1, COLUMNS),
    "a prime number of rows": lambda: randn(101, COLUMNS),
    "more than 65,535 rows": lambda: randn(65_537, COLUMNS),
    "one dimension": lambda: randn(COLUMNS),
    "no inner rows": lambda: randn(3, 0, COLUMNS),
    "too few columns": lambda: randn(6, COLUMNS - 1),
    "no columns": lambda: randn(6, 0),
    "no dimensions": lambda: randn(),
}
VALUES: dict[str, Callable[[], Tensor]] = {
    "nan": lambda: filled(math.nan),
    "infinity": lambda: filled(math.inf),
    "minus infinity": lambda: filled(-math.inf),
    "a denormal number": lambda: filled(1e-41),
    "minus zero": lambda: filled(-0.0),
    "overflow": lambda: filled(3e38),
    "all equal": lambda: torch.full((6, COLUMNS), 0.25),
    "all zero": lambda: torch.zeros(6, COLUMNS),
}
DTYPES: dict[str, Callable[[], Tensor]] = {
    str(dtype).removeprefix("torch."): lambda dtype=dtype: randn(6, COLUMNS).to(dtype)
    for dtype in (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}
DEVICES: dict[str, Callable[[], Tensor]] = {"meta": lambda: randn(6, COLUMNS).to("meta")}
INPUTS = {
    f"{kind}: {name}": make
    for kind, rows in (
        ("layout", LAYOUTS),
        ("size", SIZES),
        ("value", VALUES),
        ("dtype", DTYPES),
        ("device", DEVICES),
    )
    for name, make in rows.items()
}


def answer(run: Callable[[], Any]) -> Any:
    """The result, or the class of the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            return run()
        except Exception as error:
            return type(error)


def trained(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of the input and of the parameters."""
    x = x.detach()
    x.requires_grad_(x.is_floating_point() or x.is_complex())
    y = module(x)
    tangent = torch.cos(torch.arange(y.numel(), device=y.device)).to(y.dtype).view(y.shape)
    wanted = [each for each in (x, *module.parameters()) if each.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, tangent)]


def assert_alike(ours: Any, eager: Any) -> None:
    if isinstance(eager, type):
        assert ours is eager
        return
    assert isinstance(ours, list | tuple) and len(ours) == len(eager)
    for one, other in zip(ours, eager, strict=True):
        assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        if other.device.type == "meta":
            continue
        near = {"rtol": 1e-5, "atol": 1e-4}  # sums over many rows
        if other.dtype.itemsize == 2:
            near = {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(one, other, equal_nan=True, **near)


@pytest.mark.parametrize("name", INPUTS)
def test_results_and_errors_are_eagers(pair: Pair, name: str) -> None:
    model, fast = pair
    make = INPUTS[name]
    for run in (trained, lambda module, x: [module(x).detach()]):
        expected = answer(lambda run=run: run(model, make()))
        assert_alike(answer(lambda run=run: run(fast, make())), expected)
    with torch.no_grad():
        expected = answer(lambda: [model(make())])
        assert_alike(answer(lambda: [fast(make())]), expected)


def test_strides_of_results(pair: Pair) -> None:
    model, fast = pair
    for name, make in LAYOUTS.items():
        if make().dim() == 2:
            assert fast(make()).stride() == model(make()).stride(), name


# Ways to call ---------------------------------------------------------------------------------


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


WAYS = (
    without_gradients, in_inference_mode, for_the_input_alone, for_one_parameter, backward_twice,
    backward_again, change_of_a_saved_value, change_of_the_result, two_calls_then_two_backwards,
    checkpointed, with_a_hook, with_a_hook_inside, copied, pickled, in_double_precision, frozen,
    in_eval_mode, with_shared_parameters, by_vmap, by_jvp, under_autocast,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ways_to_call_give_what_eager_gives(pair: Pair, way: Callable[..., Any]) -> None:
    model, fast = pair
    expected = answer(lambda: way(model))
    found = answer(lambda: way(fast))
    assert_alike(found, expected)


def test_the_table_has_sixty_rows() -> None:
    assert len(INPUTS) + len(WAYS) >= 60
