"""Whether a result depends on which of equal elements an operator takes.

PyTorch leaves it open which places `topk`, an unstable `sort` and their like return for equal
elements, and documents it for `argmax` and `max`. What follows from that choice is no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusewright.verify.precision import operator_name
from fusewright.verify.reference import Reference
from fusewright.verify.run import ask
from fusewright.verify.scenarios import Expected, Results

# Each takes a dimension and returns values and places.
_FREE = frozenset("topk sort kthvalue median nanmedian mode".split())
_NEAR = 1e-3


class OtherTies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives these operators their elements in reverse, so that they take others of equal ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        named = _arguments(func, args, given) if operator_name(func) in _FREE else {}
        values = named.get("self")
        if "dim" not in named or named.get("stable") or not isinstance(values, Tensor):
            return func(*args, **given)
        self.met = True
        if not values.dim():
            return func(*args, **given)
        dim = int(named["dim"])
        found, places = func(values.flip(dim), *args[1:], **given)
        return found, values.shape[dim] - 1 - places


def _arguments(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, with those that the operator fills in."""
    wanted = func._schema.arguments
    named = {each.name: each.default_value for each in wanted if each.has_default_value()}
    named |= dict(zip((each.name for each in wanted), args, strict=False))
    return {**named, **given}


class Ties:
    """Asks a model's answers once more, until it is known in which modes it chooses nothing."""

    def __init__(self) -> None:
        self._choosing_nothing: set[str] = set()

    def decide(self, reference: Reference, expected: Expected, layout: str) -> bool:
        """Whether another choice of equal elements gives another result."""
        if reference.mode in self._choosing_nothing:
            return False
        question = replace(expected.question, blocks=())
        with OtherTies() as ways:
            other = ask(reference.eager, question, (layout,)).results[layout]
        if not ways.met:
            self._choosing_nothing.add(reference.mode)
        results = expected.eager[layout]
        return ways.met and any(_differs(e, other.get(name)) for name, e in _tensors(results))


def _tensors(results: Results) -> list[tuple[str, Tensor]]:
    return [(name, each) for name, each in results.items() if isinstance(each, Tensor)]


def _differs(one: Tensor, other: object) -> bool:
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return True
    if not one.is_floating_point():
        return not torch.equal(one, other)
    return not torch.allclose(one, other, rtol=_NEAR, atol=_NEAR, equal_nan=True)
