"""What code generation hands on: one translation unit and the C entry points in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fusewright.ir.convolution import Instead
from fusewright.ir.graph import ONE, ZERO, Dim

ALIGNMENT = 256  # of what lies behind the rest
# The least weight that is worth reading all of a text once more, which takes 1.6 to 2.0 s where a
# unit of weight is a tenth of one.
WORTH = 18


@dataclass(frozen=True)
class Rounded:
    """Scratch memory with one term, and at least `least` of these `rows` of a product: `parts`."""

    parts: tuple[Dim, ...] = ()
    rows: Dim = ONE
    least: int = 0

    def __str__(self) -> str:
        enough = "" if self.rows.is_static else f" and {self.rows} >= {self.least}"
        return f"({' + '.join(map(str, self.parts))} if terms == 1{enough} else 0)"

    def at(self, sizes: Mapping[str, int]) -> int:
        """With one term."""
        enough = self.rows.at(sizes) >= self.least
        return sum(each.at(sizes) for each in self.parts) if enough else 0


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of one call: `fixed` bytes, and `each` for every `group` of `count` that is
    begun; for some precisions more, behind that."""

    each: Dim = ZERO
    count: Dim = ONE
    group: int = 1
    fixed: int = 0
    rounded: Rounded = Rounded()

    def __bool__(self) -> bool:
        return self.each != ZERO or self.fixed > 0 or bool(self.rounded.parts)

    def __str__(self) -> str:
        terms = [str(self.fixed)] if self.fixed else []
        if self.each != ZERO:
            times = "" if self.count == ONE else f" * -(-{self.count} // {self.group})"
            terms.append(f"{self.each}{times}")
        terms += [str(self.rounded)] if self.rounded.parts else []
        return " + ".join(terms) or "0"

    @property
    def dims(self) -> tuple[Dim, ...]:
        return self.each, self.count, *self.rounded.parts, self.rounded.rows

    def behind(self, size: Callable[[Dim], str]) -> str:
        """Where it goes on for some precisions, in C++; `size` says how a size is written there."""
        if self.each == ZERO:
            begun = str(-(-self.fixed // ALIGNMENT) * ALIGNMENT)
            return f"static_cast<char*>(workspace) + {begun}" if self.fixed else "workspace"
        times = f"(({size(self.count)} + {self.group - 1}) / {self.group})"
        begun = f"({self.fixed} + {size(self.each)} * {times} + {ALIGNMENT - 1}) / {ALIGNMENT}"
        return f"static_cast<char*>(workspace) + {begun} * {ALIGNMENT}"

    def at(self, sizes: Mapping[str, int]) -> int:
        """In the precision that takes most."""
        reduced = self.each.at(sizes) * -(-self.count.at(sizes) // self.group)
        return self.fixed + reduced + self.rounded.at(sizes)


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
class Piece:
    """The text of a kernel, how long a compiler takes for it, next to others, and the macro that is
    0 where it is left out."""

    text: str
    weight: int
    macro: str


@dataclass(frozen=True)
class Source:
    """`language` is cuda or host; `text` includes nothing that is not in the standard toolchain.

    Its `pieces` are the kernels, each of which may be compiled without the others.
    """

    language: str
    text: str
    entries: tuple[Entry, ...]
    pieces: tuple[Piece, ...] = ()

    def divided(self, most: int) -> list[Source]:
        """Up to so many sources, about as heavy as each other, that together have all kernels."""
        built = [each for each in self.pieces if f"#define {each.macro} 0\n" not in self.text]
        worth = sum(each.weight for each in built) // WORTH
        held: list[list[Piece]] = [[] for _ in range(max(1, min(most, worth, len(built))))]
        for piece in sorted(built, key=lambda each: -each.weight):
            min(held, key=lambda part: sum(each.weight for each in part)).append(piece)
        return [self._without(set(self.pieces) - set(part)) for part in held]

    def _without(self, pieces: set[Piece]) -> Source:
        text = self.text
        for piece in pieces:
            text = text.replace(piece.text, "", 1)
        return replace(self, text=text)
