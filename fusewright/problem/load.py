"""Problems: files with Model, get_inputs and get_init_inputs.

This is the only place that runs the user's file. Every mistake in it becomes a `ProblemError` that
begins with the user's file and line. Torch is not imported here before the user's code imports it.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusewright.errors import ProblemError

if TYPE_CHECKING:
    from torch import nn

_numbers = itertools.count()


@dataclass(frozen=True)
class Arguments:
    """The arguments of a constructor."""

    positional: tuple[object, ...] = ()
    named: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Problem:
    """Makes models and forward arguments, new ones at each call.

    `path` is None without a file. `make_init` returns the constructor's arguments.
    """

    name: str
    path: Path | None
    source: str
    make_model: Callable[[], nn.Module]
    make_inputs: Callable[[], tuple[object, ...]]
    make_init: Callable[[], Arguments]


def load_problem(path: str | Path) -> Problem:
    """Run a problem file and check that it is complete."""
    module = _load(Path(path))
    model = _module_class(module, "Model")
    get_inputs = _function(module, "get_inputs")
    get_init_inputs = _function(module, "get_init_inputs")

    def make_init() -> Arguments:
        return _arguments(module, get_init_inputs)

    def make_inputs() -> tuple[object, ...]:
        with _blamed(module.path, "get_inputs() failed"):
            inputs = get_inputs()
        if not isinstance(inputs, list | tuple):
            raise _wrong_return(module, "get_inputs", inputs, "a list of the forward arguments")
        return tuple(inputs)

    return Problem(
        name=module.path.stem,
        path=module.path,
        source=module.source,
        make_model=lambda: _construct(module, model, make_init()),
        make_inputs=make_inputs,
        make_init=make_init,
    )


@dataclass(frozen=True)
class Candidate:
    """A file with a `ModelNew`: `make` makes one, with the problem's constructor arguments. The
    file has defined `names`."""

    make: Callable[[], nn.Module]
    names: Mapping[str, object]


def load_candidate(path: str | Path, problem: Problem) -> Candidate:
    module = _load(Path(path))
    model = _module_class(module, "ModelNew")
    return Candidate(lambda: _construct(module, model, problem.make_init()), module.names)


def candidate_factory(path: str | Path, problem: Problem) -> Callable[[], nn.Module]:
    """A function that makes the `ModelNew` of a file."""
    return load_candidate(path, problem).make


def candidate_path(path: str | Path) -> Path:
    """The whole path of a file that another process will load."""
    found = Path(path).expanduser().absolute()
    if not found.is_file():
        raise ProblemError(f"{found}: there is no such file")
    return found


@dataclass(frozen=True)
class _UserFile:
    path: Path
    source: str
    names: dict[str, object]


def _load(path: Path) -> _UserFile:
    path = path.expanduser().absolute()
    raw = _read(path)
    with _blamed(path, "cannot be read as Python"):
        source = importlib.util.decode_source(raw)
        code = compile(raw, str(path), "exec", dont_inherit=True)
    # The module stays in sys.modules, so that its classes can be pickled.
    module = types.ModuleType(f"fusewright_problem_{next(_numbers)}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        with _siblings_importable(path), _blamed(path, "failed while it was loaded"):
            exec(code, module.__dict__)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return _UserFile(path, source, vars(module))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ProblemError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ProblemError(f"{path}: cannot be read ({error.strerror})") from error


@contextmanager
def _siblings_importable(path: Path) -> Iterator[None]:
    # At the end of the path, so that a neighbour called torch.py does not hide PyTorch.
    folder = str(path.parent)
    sys.path.append(folder)
    try:
        yield
    finally:
        if folder in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]


@contextmanager
def _blamed(path: Path, what: str) -> Iterator[None]:
    """Turn any error of the user's code into one ProblemError with the user's line."""
    try:
        yield
    except ProblemError:
        raise
    except (Exception, SystemExit) as error:
        line = _line(error, path)
        where = f"{path}:{line}" if line else f"{path}:1"
        words = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
        raise ProblemError(f"{where}: {what}: {type(error).__name__}: {words}") from error


def _line(error: BaseException, path: Path) -> int | None:
    """The last line of the user's file that was running when the error was raised."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    trace = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in trace if frame.f_code.co_filename == str(path)]
    return lines[-1] if lines else None


def _module_class(module: _UserFile, name: str) -> type[nn.Module]:
    from torch import nn

    found = module.names.get(name)
    if found is None:
        classes = [key for key, value in module.names.items() if _is_own_class(value, module)]
        have = f"; it has {', '.join(classes)}" if classes else ""
        raise ProblemError(
            f"{module.path}:1: there is no class {name}: name your nn.Module {name!r}{have}"
        )
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        line = _definition_line(module, name)
        raise ProblemError(
            f"{module.path}:{line}: {name} is not an nn.Module: write `class {name}(nn.Module)`"
        )
    return found


def _is_own_class(value: object, module: _UserFile) -> bool:
    return isinstance(value, type) and value.__module__ == module.names["__name__"]


def _function(module: _UserFile, name: str) -> Callable[[], object]:
    found = module.names.get(name)
    if not callable(found):
        what = "there is no function" if found is None else "this is not a function:"
        line = 1 if found is None else _definition_line(module, name)
        wanted = "forward" if name == "get_inputs" else "constructor"
        raise ProblemError(
            f"{module.path}:{line}: {what} {name}(): it must return a list of {wanted} arguments"
        )
    return found


def _arguments(module: _UserFile, get_init_inputs: Callable[[], object]) -> Arguments:
    with _blamed(module.path, "get_init_inputs() failed"):
        found = get_init_inputs()
    if isinstance(found, dict):
        return Arguments(named=tuple(found.items()))
    if isinstance(found, list | tuple):
        return Arguments(positional=tuple(found))
    wanted = "a list (or a dict) of the constructor's arguments"
    raise _wrong_return(module, "get_init_inputs", found, wanted)


def _wrong_return(module: _UserFile, name: str, found: object, wanted: str) -> ProblemError:
    line = _definition_line(module, name)
    kind = type(found).__name__
    return ProblemError(f"{module.path}:{line}: {name}() returns a {kind}: return {wanted}")


def _construct(module: _UserFile, model: type[nn.Module], arguments: Arguments) -> nn.Module:
    given = len(arguments.positional) + len(arguments.named)
    with _blamed(module.path, f"{model.__name__} cannot be made from its {given} arguments"):
        try:
            return model(*arguments.positional, **dict(arguments.named))
        except TypeError as error:
            # The call itself failed and no line of the user's file ran: name the class's line.
            if _line(error, module.path) is None:
                line = _definition_line(module, model.__name__)
                raise ProblemError(
                    f"{module.path}:{line}: {error}: get_init_inputs() returns {given} arguments"
                ) from error
            raise


def _definition_line(module: _UserFile, name: str) -> int:
    """Where a top-level name is first defined or assigned in the user's file."""
    pattern = re.compile(rf"\s*(?:class|def|async def)?\s*{re.escape(name)}\b\s*[(:=]")
    for number, line in enumerate(module.source.split("\n"), start=1):
        if pattern.match(line):
            return number
    return 1
