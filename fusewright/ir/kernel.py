"""`Kernel`: what a kernel of any kind says about itself before it has a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol, Self

from fusewright.ir.loop import Argument


class Kernel(Protocol):
    """A frozen dataclass. Its `arguments` are first what it reads, then what it writes.

    `kind` is its kind's name. `on_tensor_cores`: whether it runs only on GPUs that have the tensor
    cores our kernels are written for.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    kind: ClassVar[str]
    on_tensor_cores: ClassVar[bool]

    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def arguments(self) -> tuple[Argument, ...]: ...
    @property
    def symbols(self) -> tuple[str, ...]: ...

    def canonical(self) -> Self:
        """The kernel under numbered names, so that equal kernels compare equal."""

    def as_repeated(self) -> Self:
        """The kernel, marked as one whose stored values another graph computes again."""

    def overwrites(self, source: str, target: str) -> bool:
        """Whether `target` may share the memory of `source`: the kernel reads each element where
        it writes one."""

    def is_empty(self, sizes: Mapping[str, int]) -> bool:
        """Whether there is nothing to compute at these sizes."""

    def bytes_moved(self, sizes: Mapping[str, int], held: Mapping[str, int]) -> int:
        """Each distinct element read once, each stored element written once; `held` is the size of
        each whole argument in bytes."""

    def operations(self, sizes: Mapping[str, int]) -> int:
        """Scalar operations; a multiply-add counts as two."""
