"""What code generation hands on: one translation unit and the C entry points in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusewright.ir import ONE, ZERO, Dim
from fusewright.window import Instead


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of one call: `fixed` bytes, and `each` for every `group` of `count` that is
    begun."""

    each: Dim = ZERO
    count: Dim = ONE
    group: int = 1
    fixed: int = 0

    def __bool__(self) -> bool:
        return self.each != ZERO or self.fixed > 0

    def __str__(self) -> str:
        if self.each == ZERO:
            return str(self.fixed)
        times = "" if self.count == ONE else f" * -(-{self.count} // {self.group})"
        return f"{self.fixed} + {self.each}{times}" if self.fixed else f"{self.each}{times}"

    @property
    def dims(self) -> tuple[Dim, Dim]:
        return self.each, self.count

    def at(self, sizes: Mapping[str, int]) -> int:
        return self.fixed + self.each.at(sizes) * -(-self.count.at(sizes) // self.group)


@dataclass(frozen=True)
class Entry:
    """`int name(void* argument…, int64_t symbol…, void* workspace, int where, void* stream)`.

    Where flags decide how precise a kernel is, `terms` says whose: "products" or "convolutions".
    The text is then compiled for one of both precisions, which a macro chooses. A convolution is as
    precise as PyTorch's would be `instead`.

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
    def binding(self) -> tuple[int, int, str]:
        """How many pointers and numbers it takes, and the macro that decides its precision."""
        return len(self.arguments), len(self.symbols), macro(self.terms) if self.terms else ""


def macro(terms: str) -> str:
    """What says in C++ with how many terms the kernels of these flags are built.

    3 is float32's precision and the default, 1 is TF32's, and 0 leaves the kernels out. Kernels of
    no flags have one, too.
    """
    return f"FW_{(terms or 'others').upper()}"


@dataclass(frozen=True)
class Source:
    """`language` is cuda or host; `text` includes nothing that is not in the standard toolchain."""

    language: str
    text: str
    entries: tuple[Entry, ...]
