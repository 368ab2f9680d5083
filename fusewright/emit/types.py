"""The classes of a model's outputs, by the names that an emitted file has for them.

The package holds the classes themselves. An emitted file finds them by name: in its copy of the
user's source, or by an import.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from fusewright.emit.bundle import ProgramPlans
from fusewright.errors import ProblemError


def output_types(modes: Sequence[ProgramPlans]) -> dict[str, type]:
    """The classes by their names in the module text."""
    return {name: kind for each in modes for name, kind in each.program.output_types}


def type_lines(modes: Sequence[ProgramPlans]) -> Iterator[str]:
    """Definitions of these names, to be placed after the user's source."""
    for name, kind in output_types(modes).items():
        module = sys.modules.get(kind.__module__)
        path = _path(kind, vars(module) if module else {})
        if path is None:
            raise ProblemError(
                f"{getattr(module, '__file__', kind.__module__)}: the model returns a "
                f"{kind.__name__}, a class that a file cannot name: define it at the top level"
            )
        first, *rest = path.split(".")
        if module is None or module.__spec__ is None:
            # The module cannot be imported: it is the problem file itself, or a notebook.
            yield f"{name} = {path}"
            continue
        yield f"from {kind.__module__} import {first} as {name}"
        if rest:
            yield f"{name} = {'.'.join([name, *rest])}"


def _path(kind: type, names: dict[str, object]) -> str | None:
    """The name of this class in its module, which may differ from its own `__qualname__`."""
    found: object = None
    for at, part in enumerate(kind.__qualname__.split(".")):
        found = getattr(found, part, None) if at else names.get(part)
    if found is kind:
        return kind.__qualname__
    return next((name for name, value in names.items() if value is kind), None)
