"""Arguments and results as trees: lists, tuples, dicts and dataclasses around tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


def map_leaves(fn: Callable[[object], object], tree: object) -> object:
    """The same lists, tuples and dicts, with `fn` applied to everything else."""
    if isinstance(tree, tuple):
        items = tuple(map_leaves(fn, item) for item in tree)
        # A named tuple keeps its class and its field names.
        make = getattr(tree, "_make", None)
        return items if make is None else make(items)
    if isinstance(tree, list):
        return [map_leaves(fn, item) for item in tree]
    if isinstance(tree, dict):
        return {key: map_leaves(fn, item) for key, item in tree.items()}
    return fn(tree)


def leaves(name: str, tree: object) -> Iterator[tuple[str, object]]:
    """Everything in a tree that is not a container, named by the expression that reads it."""
    if isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from leaves(f"{name}[{index}]", item)
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from leaves(f"{name}[{key!r}]", item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves(f"{name}.{field.name}", getattr(tree, field.name))
    else:
        yield name, tree


def values(trees: Iterable[object]) -> list[object]:
    """Everything in the trees that is not a container, without names, which take longest."""
    found: list[object] = []
    for tree in trees:
        kind: Any = type(tree)
        if _is_leaf(kind):
            found.append(tree)
        else:
            found += [each for _, each in leaves("", tree)]
    return found


@functools.lru_cache(1024)
def _is_leaf(kind: type[Any]) -> bool:
    return not (issubclass(kind, list | tuple | Mapping) or dataclasses.is_dataclass(kind))
