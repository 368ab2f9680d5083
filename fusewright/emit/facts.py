"""What is the same in all modes of a file, so that its run time need not ask: see `specialised`."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from fusewright.emit.bundle import Constant, Owner, ProgramPlans
from fusewright.emit.specialised import TRUE
from fusewright.ir.graph import Program
from fusewright.runtime.call import _FwMode

_UNKNOWN = object()
# What registration fills in, and the functions.
_SET_LATER = ("operators",)
_FUNCTIONS = ("forward", "inference", "backward")


def known(modes: Sequence[Mapping[str, str]]) -> dict[str, object]:
    """Fields that are the same in all modes of a file, and those that are true in all."""
    found: dict[str, object] = {}
    for name in _FwMode.__annotations__:
        values = [_literal(mode.get(name), name) for mode in modes]
        if None not in values and all(value is not _UNKNOWN and value for value in values):
            found[name] = TRUE
        if _UNKNOWN not in values and len(set(map(repr, values))) == 1:
            found[name] = values[0]
    return found


def _literal(text: str | None, name: str) -> object:
    if name in _SET_LATER:
        return _UNKNOWN
    if text is None:
        value = getattr(_FwMode, name, _UNKNOWN)
        plain = value is None or isinstance(value, bool | int | str | tuple)
        return value if plain else _UNKNOWN
    if name in _FUNCTIONS:
        return TRUE
    try:
        value = ast.literal_eval(text)
    except ValueError:
        return _UNKNOWN
    return value


def without_checks(plans: ProgramPlans) -> dict[str, str]:
    """The fields of a mode's record that say which checks of submodules have nothing to check."""
    owners, bound = plans.owners, bound_paths(plans.program)
    if not owners:
        return {}
    values = [value for owner in owners for _, value in owner.values]
    tensors = [each for owner in owners for each in checked_tensors(owner, bound)]
    hooks = any(owner.hooks for owner in owners)
    found = {
        "inner": any(owner.path for owner in owners),
        "tables": bool(tensors),
        "contains": any(isinstance(value, tuple) for value in values),
        "rare": hooks or any(here for _, _, here in tensors) or any(map(_has_lists, values)),
    }
    return {name: "False" for name, is_there in found.items() if not is_there}


def _has_lists(value: Constant) -> bool:
    """Whether this may be the record of a list or the like: a tuple that begins with its kind."""
    if not isinstance(value, tuple):
        return False
    return any(isinstance(each, str) or _has_lists(each) for each in value)


def bound_paths(program: Program) -> frozenset[str]:
    """The paths of the parameters and buffers that are inputs."""
    return frozenset(each.path for each in program.bindings if each.kind != "input")


def checked_tensors(
    owner: Owner, bound: frozenset[str]
) -> tuple[tuple[str, str, bool | tuple[str, ...]], ...]:
    """The tensors in a submodule's record: those that the misfit test does not check as `bound`."""
    return tuple(
        (table, name, is_set)
        for table, name, is_set in owner.tensors
        if not (is_set is True and ".".join((*owner.path, name)) in bound)
    )
