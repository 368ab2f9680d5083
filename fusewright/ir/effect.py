"""What a program needs and changes besides its inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effect:
    """What a call does to an attribute of a module, besides returning outputs.

    `owner` is the module's path. `kind`: set gives the attribute a new value; items and fill give
    its list or dict other items; add, extend and update add to its number, list or dict. For write
    and rewrite, `name` is the path of a binding, whose tensor gets new values in place; rewrite
    first ends its graph, as `detach_` does.
    """

    kind: str
    owner: tuple[str, ...]
    name: str

    @property
    def is_in_place(self) -> bool:
        return self.kind in ("write", "rewrite")


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What a program needs and does beside its graphs.

    returned: the result that each tensor of the return value is, None for a view or a binding.
    attached: bindings that the return value holds, or views of them, with their gradients.
    effects: what a call does to attributes. If there are any, the program's `output_tree` builds a
    pair: the return value, and a tuple of what each effect needs.
    held: attributes that calls change and that the program depends on: the module's path, the name,
    and the value as text, without its tensors. `changed`: the paths of all that calls change.
    forward_only: why there is no backward graph although the model has gradients; else empty.
    variant: distinguishes the programs of one mode.
    algebra: names of the equations that shortened the graphs, as the plan shows them.
    again: values that the graph of the other direction computes, too, if it is another program.
    """

    returned: tuple[int | None, ...] = ()
    attached: tuple[int, ...] = ()
    effects: tuple[Effect, ...] = ()
    held: tuple[tuple[tuple[str, ...], str, str], ...] = ()
    changed: tuple[str, ...] = ()
    forward_only: str = ""
    variant: str = ""
    algebra: tuple[str, ...] = ()
    again: frozenset[str] = frozenset()
