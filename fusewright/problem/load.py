"""Problems: a file with Model, get_inputs and get_init_inputs, or a live module with inputs.

This is the only place that runs the user's file. Whatever is wrong with it comes out as a
`ProblemError` that opens with the user's own file and line. Torch is not imported here before
the user's code has imported it.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusewright.errors import ProblemError
from fusewright.problem.nested import map_leaves

if TYPE_CHECKING:
    from torch import Tensor, nn

_numbers = itertools.count()


@dataclass(frozen=True)
class Arguments:
    """What a constructor is called with."""

    positional: tuple[object, ...] = ()
    named: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Problem:
    """A model that can be made as often as wanted, and forward arguments fresh at each call.

    `path` is None for a live module; `make_init` gives the constructor's arguments.
    """

    name: str
    path: Path | None
    source: str
    make_model: Callable[[], nn.Module]
    make_inputs: Callable[[], tuple[object, ...]]
    make_init: Callable[[], Arguments]


def load_problem(path: str | Path) -> Problem:
    """Run a problem file and check that it has all that a problem needs."""
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


def load_candidate(path: str | Path) -> type[nn.Module]:
    """The class `ModelNew` of an emitted file, or of anyone's."""
    return _module_class(_load(Path(path)), "ModelNew")


def candidate_factory(path: str | Path, problem: Problem) -> Callable[[], nn.Module]:
    """A maker of `ModelNew`s from a file, constructed with the problem's own arguments."""
    module = _load(Path(path))
    model = _module_class(module, "ModelNew")
    return lambda: _construct(module, model, problem.make_init())


def problem_from_module(module: nn.Module, example_inputs: object) -> Problem:
    """A live module as a problem; its inputs are the examples, floating values moved around."""
    inputs = (
        tuple(example_inputs) if isinstance(example_inputs, list | tuple) else (example_inputs,)
    )

    def no_constructor() -> Arguments:
        raise ProblemError(
            f"{type(module).__name__} was given as a live module: its constructor's arguments are "
            "not known; write a problem file with get_init_inputs() to compare other classes"
        )

    return Problem(
        name=re.sub(r"\W", "_", type(module).__name__),
        path=None,
        source=_class_source(type(module)),
        make_model=lambda: copy.deepcopy(module),
        make_inputs=lambda: tuple(map_leaves(_moved_values, each) for each in inputs),
        make_init=no_constructor,
    )


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
    # The module stays in sys.modules: its classes may be pickled as long as any of them lives.
    module = types.ModuleType(f"fusewright_problem_{next(_numbers)}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    loaded = False
    try:
        with _siblings_importable(path), _blamed(path, "failed while it was loaded"):
            exec(code, module.__dict__)
        loaded = True
    finally:
        if not loaded:
            del sys.modules[module.__name__]
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
    # Last, so that a neighbour called torch.py does not hide the real one.
    folder = str(path.parent)
    sys.path.append(folder)
    try:
        yield
    finally:
        if folder in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]


@contextmanager
def _blamed(path: Path, what: str) -> Iterator[None]:
    """Turn whatever the user's code raises into one ProblemError at the user's line."""
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
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _module_class(module: _UserFile, name: str) -> type[nn.Module]:
    from torch import nn

    found = module.names.get(name)
    if found is None:
        classes = [key for key, value in module.names.items() if _is_own_class(value, module)]
        have = f"; it has {', '.join(classes)}" if classes else ""
        raise ProblemError(
            f"{module.path}:1: there is no class {name}: call the nn.Module to use {name!r}{have}"
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
        what = "there is no function" if found is None else "this is no function:"
        line = 1 if found is None else _definition_line(module, name)
        wanted = "forward" if name == "get_inputs" else "constructor"
        raise ProblemError(
            f"{module.path}:{line}: {what} {name}(): it returns the list of {wanted} arguments"
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
            # The call itself was refused: no line of the user's file ran, so name the class's.
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


def _class_source(model: type) -> str:
    try:
        return inspect.getsource(model)
    except (OSError, TypeError):
        return ""


def _moved_values(leaf: object) -> object:
    """A floating tensor with the same values elsewhere; anything else as it is.

    So every value stays one that the user's example had, whatever range the model needs, while
    no result can be right that was remembered from an earlier call.
    """
    import torch

    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return _rolled(leaf)


def _rolled(leaf: Tensor) -> Tensor:
    import torch

    layout = zip(leaf.shape, leaf.stride(), strict=True)
    overlaps = any(stride == 0 and size > 1 for size, stride in layout)
    if leaf.numel() < 2 or overlaps:
        return leaf.detach().requires_grad_(leaf.requires_grad)
    shift = int(torch.randint(1, leaf.numel(), ()))
    moved = torch.empty_strided(
        leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
    ).copy_(leaf.detach().reshape(-1).roll(shift).reshape(leaf.shape))
    return moved.requires_grad_(leaf.requires_grad)
