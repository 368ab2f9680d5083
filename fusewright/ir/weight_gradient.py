"""The description of a convolution's gradient by its weights, which nothing follows.

`geometry` is the convolution's. `change` is the gradient of its result, which a `prologue` may
compute where it is read; `filter` is written.

Where the gradient by the source lays out `change` in lines of halves, `back` is that convolution as
it is walked, and `lines` what it leaves (kernels/sm90/gradient/sm90_staged_weight_gradient.cuh).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusewright.ir.convolution import Filter, Geometry, Instead, Source, given_by
from fusewright.ir.loop import Argument, LoopKernel


@dataclass(frozen=True)
class Back:
    """The gradient by the source, as far as it matters here."""

    geometry: Geometry
    lines: str


@dataclass(frozen=True)
class GradientKernel:
    name: str
    summary: str
    geometry: Geometry
    source: Source
    change: Source
    filter: Filter
    symbols: tuple[str, ...]
    instead: Instead
    prologue: LoopKernel | None = None
    back: Back | None = None

    @property
    def arguments(self) -> tuple[Argument, ...]:
        read = [*given_by(self.source, None), *given_by(self.change, self.prologue)]
        read += [Argument(self.back.lines, "uint8", False)] if self.back else []
        return (*dict.fromkeys(read), Argument(self.filter.buffer, "float32", True))

    def renamed(self, buffers: Mapping[str, str]) -> GradientKernel:
        """The same with other names for what it reads and writes."""
        source = replace(self.source, buffer=buffers[self.source.buffer])
        there = self.prologue is None
        change = replace(self.change, buffer=buffers[self.change.buffer] if there else "")
        weights = replace(self.filter, buffer=buffers[self.filter.buffer])
        back = replace(self.back, lines=buffers[self.back.lines]) if self.back else None
        return replace(self, source=source, change=change, filter=weights, back=back)
