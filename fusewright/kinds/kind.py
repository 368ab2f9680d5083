"""`Kind`: one kind of kernel, for the stages from scheduling to reporting.

Earlier stages use the kernel's own methods (`ir.kernel`). Nothing else distinguishes kinds: a new
kind is a new record in `registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from fusewright.codegen.source import Rendered, Workspace
from fusewright.ir.graph import Sizes
from fusewright.ir.kernel import Kernel
from fusewright.target.target import Target


class Choice(Protocol):
    """A schedule of any kind: a frozen dataclass of integers, flags and strings."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


K = TypeVar("K", bound=Kernel)
C = TypeVar("C", bound=Choice)


@dataclass(frozen=True)
class Kind(Generic[K, C]):
    """One kind of kernel. `words` is its name in reports."""

    kernel: type[K]
    words: str
    # The types of its schedules, by their names in the store of tuning.
    schedules: Mapping[str, type[Any]]
    # The heuristic's schedule.
    choose: Callable[[K, Target, Sizes], C]
    # Whether a schedule is legal for this kernel and target.
    permits: Callable[[K, C, Target], bool]
    # Other schedules worth measuring. Some may not be legal.
    variations: Callable[[K, C, Target, Sizes], Iterable[C]]
    # The scratch memory of one call.
    workspace: Callable[[K, C, Target], Workspace]
    # The kernel in C++.
    render: Callable[[K, C, Target], Rendered]
    # How many elements of each buffer it may access.
    elements: Callable[[K, Sizes], Mapping[str, int]]
    # How many values are summed for one result. 0: all schedules give the same bits.
    summands: Callable[[K, Sizes], int]
    # The expected microseconds of our kernel and of PyTorch's, if PyTorch has one.
    times_us: Callable[[K, Target, Sizes], tuple[float, float]] | None = None
