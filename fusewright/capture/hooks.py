"""A model without the user's hooks: a capture must neither run nor contain them.

Hooks of the model itself run around each of our calls, as they do around the original. Hooks of
submodules run where the original forward runs. Hooks that torch.nn.utils adds to a layer, such as
weight norm, are part of what the layer computes, and stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as every_module

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# runtime/ states the same rule again: it is pasted into emitted files and cannot import this.
_PART_OF_THE_LAYER = "torch.nn.utils."


@contextlib.contextmanager
def unhooked(model: nn.Module) -> Iterator[None]:
    """Remove the user's hooks, and restore them in their order."""
    tables: list[Any] = [getattr(every_module, f"_global{kind}") for kind in _KINDS]
    tables += [vars(module)[kind] for module in model.modules() for kind in _KINDS]
    before = [(table, dict(table)) for table in tables if table]
    for table, hooks in before:
        for key, hook in hooks.items():
            if not _is_part_of_its_layer(hook):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


def _is_part_of_its_layer(hook: object) -> bool:
    return any(kind.__module__.startswith(_PART_OF_THE_LAYER) for kind in type(hook).__mro__)
