"""One call of a model, as a function from tensors to tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fusewright.capture.aliases import aliases
from fusewright.capture.attributes import (
    Before,
    changes,
    refuse,
    refuse_new_tables,
    restored,
    write_buffers,
)
from fusewright.capture.source_location import Refused
from fusewright.capture.state import Attribute, Key, States
from fusewright.capture.tree import held_text, input_text, row, tree_text


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


class Flattened(nn.Module):
    """The model as a function from tensors to tensors; `output_tree` is the output's structure.

    Tensors of the output that share memory are formed by `output_tree` (see aliases.py); `returned`
    has the position of each tensor of the output, in its order, and None for these.

    The tensors of `states` are further inputs. If forward changes attributes, their new values are
    further outputs, and `output_tree` is the pair of the output and a tuple of these values.
    """

    def __init__(
        self,
        model: nn.Module,
        call: ModelCall,
        copied: frozenset[int],
        attributes: Sequence[Attribute] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.copied = copied
        self.states = States(model, attributes)
        self.output_tree = "o[0]"
        self.returned: tuple[int | None, ...] = ()
        self.held: tuple[tuple[str, str], ...] = ()
        self.attached: tuple[str, ...] = ()
        self.sizes: tuple[Any, ...] = ()
        self.output_types: dict[str, type] = {}
        self.depends: tuple[frozenset[tuple[str, str]], ...] = ()
        # Read here, because tracing leaves fakes behind where submodules are tied.
        named = model.named_parameters(remove_duplicate=False)
        self.trainable = {name: parameter.requires_grad for name, parameter in named}

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        leaves = list(self.call.leaves)
        for position, tensor in zip(self.call.tensor_positions, tensors, strict=False):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.call.spec)
        self.output_types = {}
        with restored(self.model) as before:
            placed = self.states.place(tensors)
            result = self.model(*args, **kwargs)
            _refuse_changed_arguments(leaves, self.call.spec, (args, kwargs))
            write_buffers(before)
            flat = self._returned(result, tensors)
            self.states.collect(placed, tensors, flat, self.output_types)
            _refuse_other_changes(before, frozenset(placed))
        if self.states.effects:
            self.output_tree = f"({self.output_tree}, {row(self.states.texts)})"
        self.depends = self._depends(tensors, flat)
        held = zip(self.states.paths, tensors[len(self.call.tensor_positions) :], strict=True)
        followed = {path for path, each in held if each.requires_grad}
        self.states.end_graphs(followed, self.depends)
        return tuple(
            each.clone() if position in self.copied else each for position, each in enumerate(flat)
        )

    def _returned(self, result: Any, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The outputs of the graph that `output_tree` builds the result from."""
        found: list[Any] = []
        tree_text(result, found, {})
        results = [each for each in found if isinstance(each, torch.Tensor)]
        inputs = [(each, input_text(at)) for at, each in enumerate(tensors)]
        held = held_tensors(self.model)
        self.held = tuple(held)
        inputs += [(each, held_text(at)) for at, each in enumerate(held.values())]
        shared = aliases(results, inputs)
        self.attached, self.sizes = shared.attached, shared.sizes
        flat: list[Any] = [*shared.bases]
        self.output_tree = tree_text(result, flat, self.output_types, shared.texts)
        places = {id(each): at for at, each in enumerate(flat)}
        self.returned = tuple(places.get(id(each)) for each in results)
        return flat

    @property
    def only_written(self) -> frozenset[int]:
        """Outputs that are copied into tensors and used for nothing else. They may be inputs."""
        found = self.states.written.values()
        return frozenset(at for at in found if self.output_tree.count(f"o[{at}]") == 1)

    def binding(self, position: int) -> tuple[str, str]:
        """The kind and path of a tensor input: an argument, or an attribute."""
        after = position - len(self.call.tensor_positions)
        return ("input", str(position)) if after < 0 else ("constant", self.states.paths[after])

    def _depends(
        self, tensors: Sequence[torch.Tensor], flat: Sequence[Any]
    ) -> tuple[frozenset[tuple[str, str]], ...]:
        """For each output, the arguments and parameters that autograd can reach from it.

        This can be more than the traced graph has gradients for: there, x ** 0 is a constant.
        """
        named = self.model.named_parameters(remove_duplicate=False)
        held: dict[tuple[str, str], torch.Tensor] = {("parameter", n): each for n, each in named}
        held |= {self.binding(at): each for at, each in enumerate(tensors)}
        edges = {name: get_gradient_edge(each) for name, each in held.items() if each.requires_grad}
        reached = [_edges_behind(each) if _wants(each) else set() for each in flat]
        return tuple(
            frozenset(name for name, edge in edges.items() if (edge.node, edge.output_nr) in found)
            for found in reached
        )


def held_tensors(model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """The parameters and buffers by kind and path, each under its first name."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    found |= {("parameter", name): each for name, each in model.named_parameters()}
    return found | {("buffer", name): each for name, each in model.named_buffers()}


def _refuse_changed_arguments(leaves: Sequence[Any], spec: pytree.TreeSpec, given: Any) -> None:
    found, structure = pytree.tree_flatten(given)
    same = all(one is other for one, other in zip(leaves, found, strict=False))
    if structure != spec or not same:
        raise Refused(
            "forward changes a list or dict among its arguments; return what it adds instead", None
        )


def _refuse_other_changes(before: Sequence[Before], known: frozenset[Key]) -> None:
    refuse_new_tables(before)
    for change in changes(before):
        if change.key not in known:
            raise refuse(change)


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
