"""Names that a reader of the generated code recognises: linear_weight, x, grad_output."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fusewright.ir.graph import Binding, Graph, Input

_CPP_WORDS = frozenset(
    """
    alignas alignof and asm auto bitand bitor bool break case catch char class compl const
    constexpr continue default delete do double else enum explicit export extern false float for
    friend goto if inline int long mutable namespace new noexcept not nullptr operator or private
    protected public register return short signed sizeof static struct switch template this throw
    true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor
    """.split()
)


def identifier(text: str) -> str:
    """`text` as a name that Python and C++ both accept; other characters become underscores."""
    name = re.sub(r"[^0-9A-Za-z_]", "_", text).strip("_") or "value"
    name = re.sub(r"__+", "_", name)
    if name[0].isdigit() or keyword.iskeyword(name) or name in _CPP_WORDS:
        name = f"{name}_" if not name[0].isdigit() else f"v{name}"
    return name


def binding_names(
    bindings: Iterable[Binding], forward: Callable[..., Any], taken: Iterable[str]
) -> list[str]:
    """A name for each binding, distinct from each other and from every name in `taken`."""
    parameters = [
        name
        for name, parameter in inspect.signature(forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    used = set(taken)
    names: list[str] = []
    for binding in bindings:
        if binding.kind == "input":
            position = int(binding.path)
            wish = parameters[position] if position < len(parameters) else f"input_{position}"
        else:
            wish = binding.path
        names.append(distinct(identifier(wish), used))
    return names


def distinct(name: str, used: set[str]) -> str:
    """`name`, with a number if it is taken; the returned name is added to `used`."""
    candidate, count = name, 1
    while candidate in used:
        count += 1
        candidate = f"{name}_{count}"
    used.add(candidate)
    return candidate


def renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    """The same graph under other names."""
    return Graph(
        tuple(Input(names.get(each.name, each.name), each.spec) for each in graph.inputs),
        tuple(
            replace(node.renamed(names), name=names.get(node.name, node.name))
            for node in graph.nodes
        ),
        tuple(names.get(each, each) if isinstance(each, str) else each for each in graph.outputs),
    )
