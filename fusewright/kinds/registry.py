"""All kinds of kernels, in the order of a source."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fusewright.codegen.render import unit
from fusewright.codegen.source import Entry, Rendered, Source
from fusewright.errors import CodegenError
from fusewright.ir.graph import Sizes
from fusewright.ir.kernel import Kernel
from fusewright.kinds.convolution import CONVOLUTION
from fusewright.kinds.kind import Choice, Kind
from fusewright.kinds.loop import LOOP
from fusewright.kinds.matmul import MATMUL
from fusewright.kinds.weight_gradient import WEIGHT_GRADIENT
from fusewright.target.target import Target

KINDS: tuple[Kind[Any, Any], ...] = (LOOP, MATMUL, CONVOLUTION, WEIGHT_GRADIENT)


def kind_of(kernel: Kernel) -> Kind[Any, Any]:
    """The record of a kernel's kind."""
    for kind in KINDS:
        if kind.kernel is type(kernel):
            return kind
    raise CodegenError(f"no kind of kernel is registered for {type(kernel).__name__}")


def place_of(kernel: Kernel) -> int:
    """The position of this kernel's kind in a source."""
    return KINDS.index(kind_of(kernel))


def permitted(kernel: Kernel, choice: Choice, target: Target) -> bool:
    """Whether the choice is legal for this kernel."""
    kind = kind_of(kernel)
    known = isinstance(choice, tuple(kind.schedules.values()))
    return known and kind.permits(kernel, choice, target)


def heuristic(kernel: Kernel, target: Target, sizes: Sizes) -> Choice:
    """The heuristic's schedule, for a kernel that was not measured."""
    found: Choice = kind_of(kernel).choose(kernel, target, sizes)
    return found


def render(
    kernels: Sequence[tuple[Kernel, Choice]],
    target: Target,
    shown: Collection[str] | None = None,
) -> Source:
    """These kernels with these schedules as one translation unit. Its readable part has those with
    the names `shown`, or all."""
    return unit([_rendered(*each, target) for each in kernels], target.language, shown)


def _rendered(kernel: Kernel, choice: Choice, target: Target) -> tuple[Entry, Rendered]:
    kind = kind_of(kernel)
    if not isinstance(choice, tuple(kind.schedules.values())):
        raise CodegenError(f"kernel {kernel.name}: {choice} is no schedule of a {kernel.kind}")
    part: Rendered = kind.render(kernel, choice, target)
    names = tuple(each.name for each in kernel.arguments)
    workspace = kind.workspace(kernel, choice, target)
    entry = Entry(kernel.name, names, kernel.symbols, workspace, part.terms, part.instead)
    return entry, part


def stored_name(choice: Choice) -> str:
    """The name of this schedule's type in the store of tuning."""
    return next(name for name, each in _schedules().items() if isinstance(choice, each))


def stored_type(name: str) -> type[Any] | None:
    """The type of schedules with that name."""
    return _schedules().get(name)


def _schedules() -> dict[str, type[Any]]:
    return {name: each for kind in KINDS for name, each in kind.schedules.items()}


def words_of(name: str) -> str:
    """The name of a kind for readers. For an unknown kind it is `name` itself."""
    return next((kind.words for kind in KINDS if kind.kernel.kind == name), name)
