"""The classes that a model's outputs are made with, named in an emitted file.

The library has the classes themselves. A file must reach them by name: through the user's source,
of which it holds a copy, or by an import.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from fusewright.emit.bundle import ProgramPlans
from fusewright.errors import ProblemError


def output_types(modes: Sequence[ProgramPlans]) -> dict[str, type]:
    """The name that module text has for each class."""
    return {name: kind for each in modes for name, kind in each.program.output_types}


def type_lines(modes: Sequence[ProgramPlans]) -> Iterator[str]:
    """A definition of each of those names, to stand below the user's source."""
    for name, kind in output_types(modes).items():
        module = sys.modules.get(kind.__module__)
        path = _path(kind, vars(module) if module else {})
        if path is None:
            raise ProblemError(
                f"{getattr(module, '__file__', kind.__module__)}: the model returns a "
                f"{kind.__name__}, a class that no file can name: define it at the top level"
            )
        first, *rest = path.split(".")
        if module is None or module.__spec__ is None:
            # It cannot be imported: it is the problem itself, or what a notebook has.
            yield f"{name} = {path}"
            continue
        yield f"from {kind.__module__} import {first} as {name}"
        if rest:
            yield f"{name} = {'.'.join([name, *rest])}"


def _path(kind: type, names: dict[str, object]) -> str | None:
    """How its module calls this class, whatever it calls itself."""
    found: object = None
    for at, part in enumerate(kind.__qualname__.split(".")):
        found = getattr(found, part, None) if at else names.get(part)
    if found is kind:
        return kind.__qualname__
    return next((name for name, value in names.items() if value is kind), None)
