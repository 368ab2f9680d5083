"""Where in the user's own code something happened, and the error that says so.

The user's own is what is neither Python's, PyTorch's nor ours; of several such lines the innermost
counts, and one of an installed package only where there is no other.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sysconfig
import textwrap
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fusewright.errors import CaptureError

_LIBRARIES = (Path(torch.__file__).resolve().parent, Path(__file__).resolve().parents[1])
_PYTHON = Path(sysconfig.get_paths()["stdlib"]).resolve()
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True)
class Place:
    """A line of the user's."""

    file: str
    line: int

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()


class Refused(CaptureError):
    """Something that no graph can hold, and where it is written."""

    def __init__(self, text: str, place: Place | None) -> None:
        super().__init__(text)
        self.place = place


def innermost(places: Iterable[Place]) -> Place | None:
    """The last of these that is the user's own; they run from the outermost frame inwards."""
    own = [each for each in places if _is_own(each.file)]
    written = [each for each in own if not _INSTALLED & set(Path(each.file).parts)]
    return next(iter(reversed(written or own)), None)


def _is_own(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    if any(folder in path.parents for folder in _LIBRARIES):
        return False
    return _PYTHON not in path.parents or bool(_INSTALLED & set(path.parts))


def of_error(error: BaseException) -> Place | None:
    """The user's line that was running when the error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return innermost(Place(frame.filename, frame.lineno or 1) for frame in frames)


def of_forward(model: nn.Module) -> Place | None:
    """Where the model's forward begins, or its class where it has none."""
    code = getattr(type(model).forward, "__code__", None)
    place = code and innermost([Place(code.co_filename, code.co_firstlineno)])
    return place or of_class(type(model))


def of_class(kind: type) -> Place | None:
    try:
        file, (_, line) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return None
    return innermost([Place(file, line)]) if file else None


def of_assignment(module: nn.Module, name: str) -> Place | None:
    """The line outside of the constructor that assigns this attribute, or at least names it."""
    for kind in type(module).__mro__:
        place = of_class(kind)
        if place is None:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        methods = [m for m in ast.walk(tree) if isinstance(m, ast.FunctionDef)]
        named = [
            node
            for method in methods
            if method.name != "__init__"
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and node.attr == name
        ]
        named.sort(key=lambda node: (isinstance(node.ctx, ast.Load), node.lineno))
        if named:
            return Place(place.file, place.line + named[0].lineno - 1)
    return of_forward(module)


DATA_DEPENDENT = (
    "the model's control flow or a shape depends on the values of a tensor, so there is no one "
    "graph for it; use torch.where or move the decision out of the model"
)
HIGHER_ORDER = (
    "the operator {} runs graphs of its own, which is not supported; use torch.where, a loop in "
    "Python, or move it out of the model"
)


def _explained(error: Exception, called: bool) -> str:
    kind = type(error).__name__
    first = next(iter(str(error).strip().splitlines()), kind)
    if isinstance(error, CaptureError):
        return str(error)
    if "DataDependent" in kind:
        return DATA_DEPENDENT
    if type(error).__module__.startswith("torch._dynamo"):
        # Only such an operator has its functions compiled, and may fail at that already.
        return HIGHER_ORDER.format(f"for functions (torch.cond and its like: {first})")
    if isinstance(error, TypeError) and not called:
        return f"{first}; the inputs must be the arguments of its forward, in a list or tuple"
    return f"{kind}: {first}"


def located(error: Exception, place: Place | None, model: nn.Module) -> CaptureError:
    """The error as one sentence that opens with the user's file and line, and ends with it."""
    text = _explained(error, called=place is not None)
    place = place or of_forward(model)
    where = f"{place.file}:{place.line}: " if place else ""
    line = f"\n    {place.text}" if place and place.text else ""
    return CaptureError(f"{where}cannot capture {type(model).__name__}: {text}{line}")
