"""The line of the user's code where something happened, and the error that names it.

The user's code is any code that belongs neither to Python, nor to PyTorch, nor to us. Of several
such lines the innermost counts; lines of installed packages count only if there is no other.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sysconfig
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import torch
from torch import nn

from fusewright.errors import CaptureError

_LIBRARIES = (Path(torch.__file__).resolve().parent, Path(__file__).resolve().parents[1])
_PYTHON = Path(sysconfig.get_paths()["stdlib"]).resolve()
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True)
class SourceLocation:
    """A line of the user's code."""

    file: str
    line: int

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Refused(CaptureError):
    """Something that a graph cannot hold, and its line."""

    def __init__(self, text: str, place: SourceLocation | None) -> None:
        super().__init__(text)
        self.place = place


def innermost(places: Iterable[SourceLocation]) -> SourceLocation | None:
    """The last of these locations that is the user's. They run from the outermost frame inwards."""
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


def of_error(error: BaseException) -> SourceLocation | None:
    """The user's line that was running when the error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return innermost(SourceLocation(frame.filename, frame.lineno or 1) for frame in frames)


def of_forward(model: nn.Module) -> SourceLocation | None:
    """The line where the model's forward begins, or its class if it has none."""
    code = getattr(type(model).forward, "__code__", None)
    place = code and innermost([SourceLocation(code.co_filename, code.co_firstlineno)])
    return place or of_class(type(model))


def of_class(kind: type) -> SourceLocation | None:
    try:
        file, (_, line) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return None
    return innermost([SourceLocation(file, line)]) if file else None


def of_assignment(module: nn.Module, name: str) -> SourceLocation | None:
    """The line outside the constructor that assigns this attribute, or else one that reads it."""
    for kind in type(module).__mro__:
        place = of_class(kind)
        if place is None:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        methods = [m for m in ast.walk(tree) if isinstance(m, ast.FunctionDef)]
        named = [
            (is_read, node.lineno)
            for method in methods
            if method.name != "__init__"
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute | ast.Call)
            and (is_read := _reads(node, name)) is not None
        ]
        if named:
            return SourceLocation(place.file, place.line + min(named)[1] - 1)
    return of_forward(module)


def of_expression(model: nn.Module, expression: str) -> SourceLocation | None:
    """The line that reads this expression, or the longest beginning of it, when forward runs.

    It is looked for in each forward, then in all functions of the model's file. If no line reads
    it, this is where forward begins.
    """
    kinds = dict.fromkeys(type(each) for each in model.modules())
    own = [each for each in kinds if not each.__module__.startswith("torch.")]
    codes = [each.forward.__code__ for each in own if hasattr(each.forward, "__code__")]
    found = [each for code in codes for each in _reading(code.co_filename, expression)]
    within = [each for each in found if any(_is_within(each[1], code) for code in codes)]
    best = max(within or found, key=lambda each: (each[0], -each[1].line), default=None)
    return best[1] if best else of_forward(model)


def _is_within(place: SourceLocation, code: CodeType) -> bool:
    lines = [line for _, _, line in code.co_lines() if line]
    return place.file == code.co_filename and min(lines) <= place.line <= max(lines)


def _reading(file: str, expression: str) -> Iterator[tuple[int, SourceLocation]]:
    """The lines in functions of a file that read the expression, with the length of their text."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return
    functions = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef))
    for function in functions:
        for node in ast.walk(function) if function.name != "__init__" else ():
            if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
                text = ast.unparse(node)
                if text != "self" and re.match(rf"{re.escape(text)}(?!\w)", expression):
                    yield len(text), SourceLocation(file, node.lineno)


_SETTERS = frozenset({"setattr", "register_buffer", "register_parameter", "add_module"})


def _reads(node: ast.Attribute | ast.Call, name: str) -> bool | None:
    """Whether an expression reads the attribute (or sets it); None if it is not about it."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Load) if node.attr == name else None
    called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
    given = any(isinstance(each, ast.Constant) and each.value == name for each in node.args)
    return called not in _SETTERS if given else None


DATA_DEPENDENT = (
    "the model's control flow or a shape depends on the values of a tensor, so one graph cannot "
    "describe it; use torch.where or move the decision out of the model"
)
DYNAMIC_SHAPE = (
    "the shapes that {} returns depend on the values of its tensors, or PyTorch does not say what "
    "they are before it runs, so one graph cannot describe it; move it out of the model"
)
GENERATOR = (
    "an operator takes a torch.Generator, which a graph cannot hold; leave `generator=` out, and "
    "random numbers come from PyTorch's default generator, which torch.manual_seed seeds"
)
HIGHER_ORDER = (
    "the operator {} runs functions as graphs of their own, which is not supported; use "
    "torch.where or a Python loop, or move it out of the model"
)


def _explained(error: Exception, called: bool) -> str:
    kind = type(error).__name__
    first = next(iter(str(error).strip().splitlines()), kind)
    if isinstance(error, CaptureError):
        return str(error)
    if str(torch.Generator) in first:  # before PyTorch 2.12
        return GENERATOR
    if "DataDependent" in kind:
        return DATA_DEPENDENT
    if "DynamicOutputShape" in kind:
        return DYNAMIC_SHAPE.format(first)
    if type(error).__module__.startswith("torch._dynamo"):
        # Only such an operator compiles the functions it is given, which may already fail.
        return HIGHER_ORDER.format(f"(torch.cond or similar: {first})")
    if isinstance(error, TypeError) and not called and ".forward() " in first:
        return f"{first}; pass the arguments of forward as a list or tuple"
    return f"{kind}: {first}"


def located(error: Exception, place: SourceLocation | None, model: nn.Module) -> CaptureError:
    """The error as one sentence: the user's file and line first, the text of that line last."""
    text = _explained(error, called=place is not None)
    place = place or of_forward(model)
    where = f"{place}: " if place else ""
    line = f"\n    {place.text}" if place and place.text else ""
    return CaptureError(f"{where}cannot capture {type(model).__name__}: {text}{line}")


def undifferentiable(
    error: Exception,
    changing: SourceLocation | None,
    saving: SourceLocation | None,
    model: nn.Module,
) -> str:
    """Why PyTorch has no gradients: the line that changes a tensor in place comes first."""
    text = _explained(error, called=True)
    if changing is not None and saving is not None:
        where = f"line {saving.line}" if saving.file == changing.file else f"{saving}"
        text = (
            f"this line changes a tensor in place, and the gradient of {where} needs its old "
            "values; make a new tensor instead"
        )
    place = changing or of_forward(model)
    first = f"{place}: " if place else ""
    line = f"\n    {place.text}" if place and place.text else ""
    return f"{first}PyTorch cannot differentiate {type(model).__name__}: {text}{line}"
