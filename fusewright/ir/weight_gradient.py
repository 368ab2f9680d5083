"""The description of a convolution's weight gradient, which has no epilogue.

`geometry` is the convolution's. `grad_output` is the gradient of its result, which a `prologue` may
compute where it is read; `filter` is written.

If the input gradient stages `grad_output` as fp16, `back` has that kernel's geometry and the name
of its staged input (see sm90_staged_weight_gradient.cuh).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fusewright.ir.convolution import ConvFilter, ConvSource, Geometry, LibraryPass, given_by, under
from fusewright.ir.loop import Argument, LoopKernel, numbered


@dataclass(frozen=True)
class InputGradient:
    """What this kernel needs to know about the input gradient."""

    geometry: Geometry
    staged: str


@dataclass(frozen=True)
class GradientKernel:
    name: str
    summary: str
    geometry: Geometry
    source: ConvSource
    grad_output: ConvSource
    filter: ConvFilter
    symbols: tuple[str, ...]
    instead: LibraryPass
    prologue: LoopKernel | None = None
    back: InputGradient | None = None
    kind: ClassVar[str] = "weight_gradient"
    on_tensor_cores: ClassVar[bool] = True

    @property
    def arguments(self) -> tuple[Argument, ...]:
        read = [*given_by(self.source, None), *given_by(self.grad_output, self.prologue)]
        read += [Argument(self.back.staged, "uint8", False)] if self.back else []
        return (*dict.fromkeys(read), Argument(self.filter.buffer, "float32", True))

    def canonical(self) -> GradientKernel:
        buffers = numbered(self.arguments)
        there = self.prologue is None
        return replace(
            self,
            name="",
            summary="",
            source=replace(self.source, buffer=buffers[self.source.buffer]),
            grad_output=replace(
                self.grad_output, buffer=buffers[self.grad_output.buffer] if there else ""
            ),
            filter=replace(self.filter, buffer=buffers[self.filter.buffer]),
            prologue=under(self.prologue, buffers),
            back=replace(self.back, staged=buffers[self.back.staged]) if self.back else None,
        )

    def as_repeated(self) -> GradientKernel:
        return self

    def overwrites(self, source: str, target: str) -> bool:
        return False

    def is_empty(self, sizes: Mapping[str, int]) -> bool:
        return self.geometry.result_elements(sizes) <= 0

    def bytes_moved(self, sizes: Mapping[str, int], held: Mapping[str, int]) -> int:
        of = self.geometry
        return 4 * (of.source_elements(sizes) + of.result_elements(sizes) + of.filter_elements)

    def operations(self, sizes: Mapping[str, int]) -> int:
        return self.geometry.operations(sizes)
