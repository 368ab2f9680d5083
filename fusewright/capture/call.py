"""One call of a model, as a function from tensors to tensors."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fusewright.capture.attributes import kept
from fusewright.capture.convert import inexpressible
from fusewright.errors import CaptureError


@dataclass(frozen=True)
class ModelCall:
    """One call of the model: its flattened arguments and the structure to rebuild them."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelCall:
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        return ModelCall(tuple(leaves), spec)

    @property
    def tensor_positions(self) -> tuple[int, ...]:
        return tuple(i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))

    @property
    def wants_gradients(self) -> bool:
        return any(_wants(leaf) for leaf in self.leaves)


# The module of the named tuples that max, sort and others return.
_NAMED_RESULTS = "torch.return_types"


def _named(value: Any) -> str:
    return f"{_NAMED_RESULTS}.{type(value).__name__}"


class Flattened(nn.Module):
    """The model as a function from tensors to tensors; `output_tree` is the output's structure."""

    def __init__(self, model: nn.Module, call: ModelCall, copied: frozenset[int]) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.copied = copied
        self.output_tree = "o[0]"
        self.output_types: dict[str, type] = {}
        self.depends: tuple[frozenset[tuple[str, str]], ...] = ()
        # Read here, because tracing leaves fakes behind where submodules are tied.
        named = model.named_parameters(remove_duplicate=False)
        self.trainable = {name: parameter.requires_grad for name, parameter in named}

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        leaves = list(self.call.leaves)
        for position, tensor in zip(self.call.tensor_positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.call.spec)
        flat: list[Any] = []
        with kept(self.model):
            self.output_types = {}
            self.output_tree = tree_text(self.model(*args, **kwargs), flat, self.output_types)
        self.depends = self._depends(tensors, flat)
        return tuple(
            each.clone() if position in self.copied else each for position, each in enumerate(flat)
        )

    def _depends(
        self, tensors: Sequence[torch.Tensor], flat: Sequence[Any]
    ) -> tuple[frozenset[tuple[str, str]], ...]:
        """For each output, the arguments and parameters that autograd can reach from it.

        This can be more than the traced graph has gradients for: there, x ** 0 is a constant.
        """
        named = self.model.named_parameters(remove_duplicate=False)
        held: dict[tuple[str, str], torch.Tensor] = {("parameter", n): each for n, each in named}
        held |= {("input", str(at)): each for at, each in enumerate(tensors)}
        edges = {name: get_gradient_edge(each) for name, each in held.items() if each.requires_grad}
        reached = [_edges_behind(each) if _wants(each) else set() for each in flat]
        return tuple(
            frozenset(name for name, edge in edges.items() if (edge.node, edge.output_nr) in found)
            for found in reached
        )


def _wants(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _edges_behind(output: torch.Tensor) -> set[tuple[Any, int]]:
    edge = get_gradient_edge(output)
    found: set[tuple[Any, int]] = set()
    waiting: list[tuple[Any, int]] = [(edge.node, edge.output_nr)]
    nodes: set[Any] = set()
    while waiting:
        node, position = waiting.pop()
        found.add((node, position))
        if node not in nodes:
            nodes.add(node)
            waiting += [each for each in node.next_functions if each[0] is not None]
    return found


def tree_text(value: Any, flat: list[Any], types: dict[str, type]) -> str:
    """Python text that rebuilds `value` from the list `o`, whose items are appended to `flat`.

    The classes that the text names are added to `types`.
    """
    if isinstance(value, torch.Tensor | torch.SymInt):
        flat.append(value)
        return f"o[{len(flat) - 1}]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, torch.SymFloat | torch.SymBool):
        raise inexpressible(value.node.expr)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        items = row(tree_text(item, flat, types) for item in value)
        return f"{_type_name(type(value), types)}._make({items})"
    if type(value) in (tuple, list, torch.Size) or type(value).__module__ == _NAMED_RESULTS:
        texts = [tree_text(item, flat, types) for item in value]
        if type(value) is list:
            return "[" + ", ".join(texts) + "]"
        if type(value) is tuple:
            return row(texts)
        return f"{'torch.Size' if type(value) is torch.Size else _named(value)}({row(texts)})"
    if type(value) is dict:
        pairs = (f"{key!r}: {tree_text(item, flat, types)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if type(value) is OrderedDict:
        items = ", ".join(f"({k!r}, {tree_text(v, flat, types)})" for k, v in value.items())
        return f"{_type_name(OrderedDict, types)}([{items}])"
    raise CaptureError(
        f"the model returns a {type(value).__name__}; return tensors, numbers, tuples, lists "
        "or dicts of them"
    )


def row(texts: Iterable[str]) -> str:
    return "(" + "".join(text + ", " for text in texts).rstrip(" ") + ")"


def _type_name(kind: type, types: dict[str, type]) -> str:
    """A name for a class: unique among classes of its name, and allowed in any emitted file."""
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}".encode()).hexdigest()[:8]
    word = re.sub(r"\W", "_", kind.__name__, flags=re.ASCII).replace("pass", "pas_s")
    name = f"_FW_TYPE_{word}_{digest}"
    types[name] = kind
    return name
