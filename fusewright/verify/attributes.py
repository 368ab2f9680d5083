"""The plain attributes that a model changes: hidden states, counters, lists that forward fills.

Every question must find them as they were, in the model and in each candidate, and their new values
are compared, like those of buffers. What else a candidate keeps is its own affair and stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor, nn

from fusewright.problem.nested import leaves, map_leaves
from fusewright.runtime import altered

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_COMPARED = (Tensor, bool, int, float, str, type(None))


class Missing:
    """Stands for an attribute that is not there."""


def attributes_of(model: nn.Module) -> Iterator[tuple[str, dict[str, object], str, object]]:
    """The attributes of the model's own classes: full name, the dict that holds it, name, value."""
    for path, module in model.named_modules():
        if altered._fw_is_pytorchs(type(module)):
            continue
        for name, value in list(vars(module).items()):
            # Names with this prefix are of optimized modules.
            if name not in _OF_EVERY_MODULE and not name.startswith("_fw_"):
                yield f"{path}.{name}" if path else name, module.__dict__, name, value


def kept_attributes(model: nn.Module) -> Mapping[str, object]:
    """Copies of all attributes, by their full names."""
    return {full: _copied(value) for full, _, _, value in attributes_of(model)}


def changed_attributes(model: nn.Module, before: Mapping[str, object]) -> Mapping[str, object]:
    """The attributes that are not as before, with their values before."""
    now = {full: value for full, _, _, value in attributes_of(model)}
    return {
        full: before.get(full, Missing)
        for full in {**before, **now}
        if not _same(before.get(full, Missing), now.get(full, Missing))
    }


def restore_attributes(model: nn.Module, attributes: Mapping[str, object]) -> None:
    """Give these attributes these values; a candidate may lack the module of some."""
    modules = dict(model.named_modules())
    for full, value in attributes.items():
        path, _, name = full.rpartition(".")
        held = modules[path].__dict__ if path in modules else {}
        if value is Missing:
            held.pop(name, None)
        else:
            held[name] = _copied(value)


def attribute_values(model: nn.Module, names: Iterable[str]) -> dict[str, object]:
    """What can be compared in the attributes of these names."""
    wanted = frozenset(names)
    return {
        f"attribute {inner}": leaf
        for full, _, _, value in attributes_of(model)
        if full in wanted
        for inner, leaf in leaves(full, value)
        if isinstance(leaf, _COMPARED)
    }


def widen_attributes(model: nn.Module, widened: Callable[[object], object]) -> None:
    """Convert the tensors in all attributes, which `double` leaves alone."""
    for _, held, name, value in attributes_of(model):
        if _has_tensors(value):
            held[name] = map_leaves(widened, value)


def tensor_attributes(model: nn.Module) -> dict[str, object]:
    """The attributes that hold tensors, by their full names."""
    return {full: value for full, _, _, value in attributes_of(model) if _has_tensors(value)}


def share_attributes(theirs: Mapping[str, object], candidate: nn.Module) -> None:
    """Give a candidate copies of the tensors that the model's attributes hold."""
    for full, held, name, value in attributes_of(candidate):
        if _has_tensors(value) and full in theirs:
            held[name] = _copied(theirs[full])


def _has_tensors(value: object) -> bool:
    return any(isinstance(leaf, Tensor) for _, leaf in leaves("", value))


def _copied(value: object) -> object:
    """Copies of tensors and of the containers around them; everything else is itself."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad and value.is_leaf)
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = map(_copied, value)
        return made
    if isinstance(value, dict):
        filled = copy.copy(value)
        filled.update((key, _copied(item)) for key, item in value.items())
        return filled
    return map_leaves(_copied, value) if isinstance(value, tuple) else value


def _same(before: object, now: object) -> bool:
    """Whether two values are equal, tensors by their elements."""
    mine, theirs = (dict(leaves("", value)) for value in (before, now))
    return mine.keys() == theirs.keys() and all(_equal(mine[key], theirs[key]) for key in mine)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return alike and bool(((one == other) | ((one != one) & (other != other))).all())
    if one is other or type(one) is not type(other):
        return one is other
    # Other objects cannot be compared.
    return not isinstance(one, _COMPARED) or bool(one == other)
