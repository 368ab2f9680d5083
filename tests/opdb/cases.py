"""From an entry of a database to cases: a model, its inputs, and what to ask of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tests.opdb.databases import is_pointwise, modules, operators
from tests.opdb.models import Called, Layer, tensors_of
from tests.opdb.variants import LAYOUTS, larger, special, strewn

DTYPES = {
    name: getattr(torch, name)
    for name in "float32 float64 bfloat16 float16 int64 int32 uint8 bool".split()
}
_MOST_ELEMENTS = 200_000


@dataclass(frozen=True)
class Entry:
    """An operator or a module of the databases, in one dtype."""

    kind: str
    name: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}"


@dataclass(frozen=True)
class Case:
    """One call. `make` gives the model anew; `by_element`: each result depends on one element of
    each input, and is compared alone. `modes` are those that the model is called in. If eager mode
    refuses the call, that of the first of the `others` that it takes stands for it."""

    entry: Entry
    variant: str
    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    more: tuple[Tensor, ...] = ()
    by_element: bool = False
    modes: tuple[str, ...] = ("train",)
    others: tuple[Case, ...] = ()

    def __str__(self) -> str:
        return f"{self.entry} {self.variant}"


def entry_of(case: str) -> tuple[Entry, str]:
    """The entry and the variant of a case's name."""
    name, dtype, *variant = case.split(" ")
    kind = "module" if name in modules() else "operator"
    return Entry(kind, name, dtype), " ".join(variant)


def entries(kind: str, dtypes: Sequence[str], device: str) -> list[Entry]:
    """What the database says works in these dtypes on this device."""
    if kind == "module":
        return [
            Entry(kind, name, dtype)
            for name, info in modules().items()
            for dtype in dtypes
            if DTYPES[dtype] in info.dtypes
        ]
    return [
        Entry(kind, name, dtype)
        for name, info in operators().items()
        for dtype in dtypes
        if DTYPES[dtype] in info.supported_dtypes(torch.device(device).type)
    ]


def cases_of(entry: Entry, device: str, variants: Collection[str] = ()) -> list[Case]:
    """The cases of one entry, or those with these variants. Eager may refuse some of them."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = _of_module(entry, device) if entry.kind == "module" else _of_operator(entry, device)
        return [each for each in made if not variants or each.variant in variants]


def _of_operator(entry: Entry, device: str) -> Iterator[Case]:
    info, dtype = operators()[entry.name], DTYPES[entry.dtype]
    backward = info.supported_backward_dtypes(torch.device(device).type)
    gradients = info.supports_autograd and dtype in backward
    samples = list(info.sample_inputs(device, dtype, requires_grad=gradients))
    calls = [((each.input, *each.args), each.kwargs) for each in samples]
    calls = [each for each in calls if _elements(each) <= _MOST_ELEMENTS]
    if not calls:
        return
    for word, at in (("first", 0), ("last", len(calls) - 1), ("middle", len(calls) // 2)):
        if word == "first" or at not in (0, len(calls) - 1) or (word == "last" and at):
            more = larger(tensors_of(calls[at])) if word == "first" else None
            yield _called(entry, word, info.op, calls[at], more=tuple(more or ()))
    yield from _varied(entry, info.op, calls)
    floating = dtype.is_floating_point
    if floating and is_pointwise(entry.name):
        yield from _special(entry, info.op, calls)
    elif floating and "linalg" not in entry.name:
        inputs = strewn(tensors_of(calls[0]))
        if inputs is not None:
            yield _called(entry, "strewn", info.op, calls[0], inputs)
    if info.inplace_variant is not None:
        yield _called(entry, "in place", info.inplace_variant, calls[0])


def _varied(entry: Entry, function: Any, calls: Sequence[Any]) -> Iterator[Case]:
    """Each layout, for the first call that takes it. Other dtypes than float32 have one of
    them, and each operator another one."""
    words = [*LAYOUTS]
    if entry.dtype != "float32":
        words = [words[crc32(str(entry).encode()) % len(words)]]
    for word in words:
        vary = LAYOUTS[word]
        found = ((call, vary(tensors_of(call))) for call in calls[:12])
        made = [_called(entry, word, function, *each) for each in found if each[1] is not None]
        if made:
            yield replace(made[0], others=tuple(made[1:]))


def _special(entry: Entry, function: Any, calls: Sequence[Any]) -> Iterator[Case]:
    inputs = special(tensors_of(calls[0]))
    if inputs is not None:
        yield _called(entry, "special", function, calls[0], inputs, by_element=True)


def _called(
    entry: Entry,
    variant: str,
    function: Any,
    call: Any,
    inputs: Sequence[Tensor] | None = None,
    more: tuple[Tensor, ...] = (),
    by_element: bool = False,
) -> Case:
    given = tuple(tensors_of(call) if inputs is None else inputs)
    return Case(entry, variant, lambda: Called(function, *call), given, more, by_element)


def _elements(call: Any) -> int:
    return sum(each.numel() for each in tensors_of(call))


def _of_module(entry: Entry, device: str) -> Iterator[Case]:
    for mode in ("train", "eval"):
        yield from _of_mode(entry, device, mode)


def _of_mode(entry: Entry, device: str, mode: str) -> Iterator[Case]:
    info, dtype = modules()[entry.name], DTYPES[entry.dtype]
    found = info.module_inputs_func(
        info, device=device, dtype=dtype, requires_grad=True, training=mode == "train"
    )
    found = [each for each in found if each.forward_input is not None]
    ends = {"first": 0, "last": len(found) - 1, "middle": len(found) // 2}
    taken: set[int] = set()
    for word, at in ends.items():
        if at in taken or not found:
            continue
        taken.add(at)
        made, given = found[at].constructor_input, found[at].forward_input
        make = _layer(info.module_cls, made, given, device, dtype)
        inputs = tuple(tensors_of((given.args, given.kwargs)))
        more = larger(inputs) if word == "first" else None
        yield Case(entry, f"{word} {mode}", make, inputs, tuple(more or ()), modes=(mode,))
        for layout in ("channels last", "gaps", "expanded") if word == "first" else ():
            other = LAYOUTS[layout](inputs)
            if other is not None:
                yield Case(entry, f"{layout} {mode}", make, tuple(other), modes=(mode,))


def _layer(
    kind: Any, made: Any, given: Any, device: str, dtype: torch.dtype
) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(1)
        layer = kind(*made.args, **made.kwargs).to(device=device, dtype=dtype)
        if any(is_lazy(each) for each in layer.parameters()):
            with torch.no_grad():
                layer(*given.args, **given.kwargs)
        return Layer(layer, given.args, given.kwargs)

    return make
