"""Calls that PyTorch's databases do not make: mixed dtypes, numbers as operands, changes in place,
`out=`, tensors without elements or dimensions, and odd places in memory.

Each corner is a function and its tensors. Corners of a group have tensors of one size, or of sizes
that no program needs to be dynamic for, so many of them make one model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.opdb.runs import fresh

Function = Callable[..., Any]
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


@dataclass(frozen=True)
class Corner:
    name: str
    function: Function
    inputs: tuple[Tensor, ...]


class _Drawn:
    """Tensors of normal numbers, whole ones for integers; floats want gradients."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(11)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        x = torch.randn(shape, generator=self._generator)
        if dtype.is_floating_point:
            return x.to(dtype).requires_grad_()
        if dtype == torch.bool:
            return x > 0
        return (x * 20).abs().to(dtype) if dtype == torch.uint8 else (x * 5).to(dtype)


PAIRS = (
    (torch.float32, (4, 5), torch.int64, (4, 5)),
    (torch.float16, (4, 5), torch.float32, ()),
    (torch.bool, (4, 5), torch.float32, (5,)),
    (torch.uint8, (4, 5), torch.int32, (4, 1)),
    (torch.float32, (4, 5), torch.int64, ()),
    (torch.bfloat16, (4, 5), torch.float16, (4, 5)),
    (torch.int32, (4, 5), torch.int64, ()),
    (torch.int64, (4, 5), torch.float32, ()),
    (torch.uint8, (4, 5), torch.int8, (4, 5)),
    (torch.float16, (4, 5), torch.float32, (4, 5)),
    (torch.int16, (4, 5), torch.bool, (4, 5)),
    (torch.bool, (4, 5), torch.bool, (4, 5)),
    (torch.int32, (4, 5), torch.bfloat16, (4, 5)),
)
OF_TWO: dict[str, Function] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "div down": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "pow": torch.pow,
    "maximum": torch.maximum,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "atan2": torch.atan2,
    "lt": torch.lt,
    "eq": torch.eq,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "add twice": lambda a, b: torch.add(a, b, alpha=2),
    "copysign": torch.copysign,
    "hypot": torch.hypot,
    "logaddexp": torch.logaddexp,
    "xlogy": torch.xlogy,
    "and": torch.bitwise_and,
    "shift": torch.bitwise_left_shift,
}
WITH_NUMBERS: dict[str, Function] = {
    "x + 1.5": lambda x: x + 1.5,
    "2 - x": lambda x: 2 - x,
    "x * 2": lambda x: x * 2,
    "x / 3": lambda x: x / 3,
    "3 / x": lambda x: 3 / (x + 7),
    "x // 2": lambda x: x // 2,
    "x % 3": lambda x: x % 3,
    "x ** 2": lambda x: x**2,
    "x ** 0.5": lambda x: (x.abs() + 1) ** 0.5,
    "2 ** x": lambda x: 2**x,
    "x > 1.5": lambda x: x > 1.5,
    "clamp between floats": lambda x: x.clamp(-1.5, 2.5),
    "clamp from an integer": lambda x: x.clamp(min=1),
    "a number that does not fit": lambda x: x * 300,
    "x + True": lambda x: x + True,
    "x * infinity": lambda x: x * math.inf,
    "-x": lambda x: -x,
    "~x": lambda x: ~x,
    "a complex number": lambda x: (x + 1j).real,
    "sum": lambda x: x.sum(),
    "sum in float64": lambda x: x.sum(1, dtype=torch.float64),
    "mean": lambda x: x.mean(),
    "prod": lambda x: x.prod(1),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(1),
    "amax": lambda x: x.amax(1),
    "argmax": lambda x: x.argmax(1),
    "any": lambda x: x.any(1),
    "all": lambda x: x.all(),
    "std": lambda x: x.std(1),
    "var": lambda x: x.var(0, correction=0),
    "sqrt": lambda x: (x + 9).sqrt(),
    "sigmoid": lambda x: x.sigmoid(),
    "abs": lambda x: x.abs(),
    "relu": lambda x: x.relu(),
    "sign": lambda x: x.sign(),
    "floor": lambda x: x.floor(),
    "round": lambda x: x.round(),
    "count": lambda x: x.count_nonzero(1),
    "softmax": lambda x: x.softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "norm": lambda x: x.norm(),
    "exp": lambda x: x.exp(),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=2),
    "nan_to_num": lambda x: x.nan_to_num(1),
    "isnan": lambda x: x.isnan(),
    "to int32": lambda x: x.to(torch.int32),
    "to uint8": lambda x: x.to(torch.uint8),
    "to float16": lambda x: x.half(),
    "to bool": lambda x: x.bool(),
    "where x or 0": lambda x: torch.where(x > 1, x, 0),
    "where x or 0.5": lambda x: torch.where(x > 1, x, 0.5),
    "masked_fill": lambda x: x.masked_fill(x > 1, 7),
    "diff": lambda x: x.diff(dim=1),
    "roll": lambda x: x.roll(1, 1),
    "pad": lambda x: F.pad(x, (1, 2), value=1),
}


def _set(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x * 2


def _halves(x: Tensor) -> Tensor:
    a, b = x.tensor_split(2, 1)
    a.mul_(3)
    b.add_(a[:, : b.shape[1]])
    return x * 2


def _overlapping_views(x: Tensor) -> Tensor:
    a, b = x[1:], x[:-1]
    a.add_(1)
    b.mul_(2)
    return a + b


def _rows_exchanged(x: Tensor) -> Tensor:
    y = x[0].clone()
    x[0] = x[1]
    x[1] = y
    return x * 2


def _changed_after_use(x: Tensor) -> Tensor:
    y = x * 2
    z = y.relu()
    y.add_(1)
    return z + y


def _into(function: Function, *given: Any, shape: tuple[int, ...] = (4, 5)) -> Tensor:
    made = torch.empty(shape)
    function(*given, out=made)
    return made * 2


def _into_gaps(x: Tensor) -> Tensor:
    made = torch.zeros(4, 10)
    torch.mul(x, 3, out=made[:, ::2])
    return made + 1


IN_PLACE: dict[str, Function] = {
    "clamp_": lambda x: (x * 2).clamp_(-1, 1) + x,
    "a chain": lambda x: (x * 1).add_(1).mul_(3).relu_().sub_(x),
    "some columns": lambda x: _set(x * 1, (slice(None), slice(1, 3)), 0.0),
    "every second row": lambda x: _set(x * 1, (slice(None, None, 2),), x[:2]),
    "where positive": lambda x: _set(x * 1, x > 0, 7.0),
    "some rows": lambda x: _set(x * 1, (torch.tensor([0, 2]),), 1.0),
    "one row": lambda x: _set(x * 1, (1,), x[0]),
    "copy_ into integers": lambda x: torch.zeros(4, 5, dtype=torch.int64).copy_(x * 3),
    "zero_": lambda x: (x * 2).zero_() + x,
    "masked_fill_": lambda x: (x * 1).masked_fill_(x > 2, -math.inf).softmax(1),
    "t_": lambda x: (x * 2).t_() + 1,
    "unsqueeze_": lambda x: (x * 2).unsqueeze_(1) + 1,
    "two halves": lambda x: _halves(x * 1),
    "views that overlap": lambda x: _overlapping_views(x * 1),
    "rows exchanged": lambda x: _rows_exchanged(x * 1),
    "changed after use": _changed_after_use,
    "cumsum_": lambda x: (x * 1).cumsum_(1) * 2,
    "tril_": lambda x: (x * 1).tril_() * 2,
    "pow_": lambda x: (x.abs() + 1).pow_(2.5),
    "a part of a view": lambda x: (x * 1).view(-1)[3:9].neg_() * 2,
    "uint8 around its end": lambda x: x.detach().to(torch.uint8).add_(250),
    "int8 around its end": lambda x: x.detach().to(torch.int8).mul_(100),
    "float16 with float32": lambda x: (x * 1).half().add_(x),
    "out= a tensor": lambda x: _into(torch.neg, x.detach()),
    "out= an empty tensor": lambda x: _into(torch.neg, x.detach(), shape=(0,)),
    "out= another dtype": lambda x: _into(torch.add, x.detach().to(torch.int64), 1),
    "out= gaps": lambda x: _into_gaps(x.detach()),
    "out= a product": lambda x: _into(torch.mm, x.detach(), x.detach().t(), shape=(4, 4)),
}
REDUCED: dict[str, Function] = {
    "sum": lambda x: x.sum(-1),
    "sum, kept": lambda x: x.sum(-1, keepdim=True),
    "sum of the first": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "prod": lambda x: x.prod(-1),
    "var": lambda x: x.var(-1, correction=0),
    "std": lambda x: x.std(),
    "softmax": lambda x: x.softmax(-1) * 2,
    "softmax of the first": lambda x: x.softmax(0) * 2,
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1),
    "cumsum": lambda x: x.cumsum(-1) * 2,
    "logcumsumexp": lambda x: x.logcumsumexp(0) * 2,
    "any": lambda x: (x > 0).any(0),
    "all": lambda x: (x > 0).all(-1),
    "flip": lambda x: x.flip(0) * 2,
    "flip nothing": lambda x: x.flip(()) * 2,
    "roll": lambda x: x.roll(1) * 2,
    "max": lambda x: x.amax(0) * 2,
    "argmax": lambda x: x.argmax(0),
    "sort": lambda x: x.sort(0).values * 2,
    "stack": lambda x: torch.stack([x, x * 2]) * 3,
    "expand": lambda x: x.expand(3, *x.shape) * 2,
    "normalize": lambda x: F.normalize(x, dim=0),
    "where": lambda x: torch.where(x > 0, x, 2 * x),
    "count": lambda x: x.count_nonzero(),
}
ON_ROWS: dict[str, Function] = {
    "pointwise": lambda x: torch.sigmoid(x) * 2 + x,
    "sum of columns": lambda x: (x * 2).sum(0),
    "sum of rows": lambda x: (x * 2).sum(1),
    "sum": lambda x: (x + 1).sum(),
    "softmax": lambda x: x.softmax(1) * x,
    "transpose": lambda x: x.t() * 2 + 1,
    "matmul": lambda x: (x @ x.t()).relu() * 2,
    "cumsum": lambda x: x.cumsum(0) * x,
    "layer_norm": lambda x: F.layer_norm(x, (5,)) * 2,
    "var": lambda x: x.var(0) + 1,
    "reshape": lambda x: x.reshape(-1)[3:17].view(7, 2) * 2,
    "flip": lambda x: x.flip(0, 1) * 2 + x,
    "cat": lambda x: torch.cat([x * 2, x], 1) + 1,
    "argmax": lambda x: (x * 2).argmax(1),
}


def _placed() -> dict[str, Tensor]:
    base = torch.randn(60, generator=torch.Generator().manual_seed(5))
    return {
        "overlapping": base.as_strided((4, 5), (2, 1)),
        "with an offset": base[7:27].view(4, 5),
        "negative": torch.complex(base[:20], base[20:40]).view(4, 5).conj().imag,
        "one row": base[:5].expand(4, 5),
        "one column": base[:4, None].expand(4, 5),
        "one number": base[3].expand(4, 5),
        "every second row": base[:40].view(8, 5)[::2],
        "every second column": base[:40].view(4, 10)[:, 1::2],
        "transposed": base[:20].view(5, 4).t(),
        "with gaps": base.as_strided((4, 5), (11, 2), 3),
    }


def corners() -> dict[str, list[Corner]]:
    """All of them, by group. Eager mode refuses some."""
    drawn = _Drawn()
    groups = {"two dtypes": list(_of_two(drawn))}
    for dtype in DTYPES:
        made = [(name, f, drawn(4, 5, dtype=dtype)) for name, f in WITH_NUMBERS.items()]
        groups[f"numbers and {str(dtype)[6:]}"] = [Corner(n, f, (x,)) for n, f, x in made]
    groups["in place"] = [Corner(name, f, (drawn(4, 5),)) for name, f in IN_PLACE.items()]
    for words, shape in (("no dimensions", ()), ("no rows", (0, 5)), ("no columns", (4, 0))):
        groups[words] = [Corner(name, f, (drawn(*shape),)) for name, f in REDUCED.items()]
    for words, x in _placed().items():
        groups[words] = [Corner(name, f, (fresh(x),)) for name, f in ON_ROWS.items()]
    return groups


def _of_two(drawn: _Drawn) -> Iterator[Corner]:
    for name, function in OF_TWO.items():
        for first, shape, second, other in PAIRS:
            words = f"{name} of {str(first)[6:]} and {str(second)[6:]}{list(other)}"
            inputs = drawn(*shape, dtype=first), drawn(*other, dtype=second)
            yield Corner(words, function, inputs)
