"""What code generation hands on: one translation unit and the C entry points in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusewright.ir import ONE, ZERO, Dim
from fusewright.window import Instead


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of one call: `each` bytes for every `group` of `count` that is begun."""

    each: Dim = ZERO
    count: Dim = ONE
    group: int = 1

    def __bool__(self) -> bool:
        return self.each != ZERO

    def __str__(self) -> str:
        if self.count == ONE:
            return str(self.each)
        return f"{self.each} * -(-{self.count} // {self.group})"

    @property
    def dims(self) -> tuple[Dim, Dim]:
        return self.each, self.count

    def at(self, sizes: Mapping[str, int]) -> int:
        return self.each.at(sizes) * -(-self.count.at(sizes) // self.group)


@dataclass(frozen=True)
class Entry:
    """`int name(void* argument…, int64_t symbol…, void* workspace, int where, void* stream)`.

    Where flags decide how precise a kernel is, it takes `int64_t terms` after its symbols: 3 for
    float32's precision, 1 for TF32's; `terms` says whose flags, "products" or "convolutions". A
    convolution is as precise as PyTorch's would be `instead`.

    `where` is the device index (CUDA) or the number of threads (host); host ignores `stream`.
    It returns 0, or an error code that `fw_error_text(int)` puts into words. A null output
    pointer means that nobody wants that output: it is not written.
    """

    name: str
    arguments: tuple[str, ...]
    symbols: tuple[str, ...]
    workspace: Workspace = Workspace()
    terms: str = ""
    instead: Instead | None = None

    @property
    def numbers(self) -> int:
        """How many int64_t it takes."""
        return len(self.symbols) + bool(self.terms)


@dataclass(frozen=True)
class Source:
    """`language` is cuda or host; `text` includes nothing that is not in the standard toolchain."""

    language: str
    text: str
    entries: tuple[Entry, ...]
