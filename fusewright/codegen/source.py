"""The result of code generation: one translation unit and its C entry points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusewright.ir.convolution import LibraryPass
from fusewright.ir.graph import ONE, ZERO, Dim
from fusewright.ir.loop import LoopKernel

ALIGNMENT = 256  # bytes; of each further part of a workspace
# A text is divided among so many compilers at most.
MOST_PARTS = 8
# The least weight of a part that is compiled separately. The compiler then reads the whole text
# once more, which takes 1.6 to 2.0 s. A unit of weight is 0.1 s.
WORTH = 18
KERNELS_LINE = "// The fused kernels stand here.\n"


@dataclass(frozen=True)
class RoundedWorkspace:
    """Scratch memory for rounded operands: the sum of `parts`, if the kernel is built with one term
    and `rows` is at least `least`."""

    parts: tuple[Dim, ...] = ()
    rows: Dim = ONE
    least: int = 0

    def __str__(self) -> str:
        enough = "" if self.rows.is_static else f" and {self.rows} >= {self.least}"
        return f"({' + '.join(map(str, self.parts))} if terms == 1{enough} else 0)"

    def at(self, sizes: Mapping[str, int]) -> int:
        """Bytes at these sizes, with one term."""
        enough = self.rows.at(sizes) >= self.least
        return sum(each.at(sizes) for each in self.parts) if enough else 0


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of one call: `fixed` bytes, and `each` bytes for every started `group` of
    `count`. Some precisions need `rounded` after that."""

    each: Dim = ZERO
    count: Dim = ONE
    group: int = 1
    fixed: int = 0
    rounded: RoundedWorkspace = RoundedWorkspace()

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
        """The address of the `rounded` part as C++ text. `size` writes a size as C++."""
        if self.each == ZERO:
            begun = str(-(-self.fixed // ALIGNMENT) * ALIGNMENT)
            return f"static_cast<char*>(workspace) + {begun}" if self.fixed else "workspace"
        times = f"(({size(self.count)} + {self.group - 1}) / {self.group})"
        times = times if self.group > 1 else size(self.count)
        count = "" if self.count == ONE else f" * {times}"
        fixed = f"{self.fixed} + " if self.fixed else ""
        return f"fw::behind(workspace, {fixed}{size(self.each)}{count})"

    def at(self, sizes: Mapping[str, int]) -> int:
        """Bytes at these sizes, in the precision that needs most."""
        reduced = self.each.at(sizes) * -(-self.count.at(sizes) // self.group)
        return self.fixed + reduced + self.rounded.at(sizes)


@dataclass(frozen=True)
class Entry:
    """`int name(void* argument…, int64_t symbol…, void* workspace, int where, void* stream)`.

    If PyTorch's flags decide how precise a kernel is, `terms` names them: "matmuls" (the flags of
    matmuls) or "convolutions". A macro then chooses the precision for which the text is compiled. A
    convolution is as precise as the PyTorch pass that it replaces (`instead`).

    `where` is the device index (CUDA) or the number of threads (host). The host ignores `stream`.
    The function returns 0 or an error code; `fw_error_text(int)` gives its message. An output whose
    pointer is null is not written.
    """

    name: str
    arguments: tuple[str, ...]
    symbols: tuple[str, ...]
    workspace: Workspace = Workspace()
    terms: str = ""
    instead: LibraryPass | None = None

    @property
    def macro(self) -> str:
        """The macro that decides the precision, if flags do."""
        return macro(self.terms) if self.terms else ""


@dataclass(frozen=True)
class Functor:
    """The struct that drivers call: its lines behind the first, and the functions with its
    arithmetic. `names` are those of the values in the arithmetic, and of symbols."""

    name: str
    math: tuple[str, ...]
    lines: tuple[str, ...]
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rendered:
    """One kernel in C++, and what it needs from the translation unit.

    `comment` says what it computes. `functors` are what drivers call, and `lines` are its entry.
    The names of its functions and structs begin with `names`. `bodies` are its loops, whose
    operators have their own headers. `headers` are the other files of kernels/ that it needs.
    `weight` is nvcc's time for it, in tenths of a second on a Neoverse-N1. `terms` and `instead`
    are those of its `Entry`. `options` maps macros of its headers to whether it needs them on. A
    macro that no kernel of a unit needs is switched off.
    """

    lines: list[str]
    weight: int
    names: tuple[str, ...]
    comment: tuple[str, ...] = ()
    functors: tuple[Functor, ...] = ()
    bodies: tuple[LoopKernel, ...] = ()
    headers: tuple[str, ...] = ()
    terms: str = ""
    instead: LibraryPass | None = None
    options: Mapping[str, bool] = field(default_factory=dict)


def macro(terms: str) -> str:
    """The C++ macro with the number of terms for which the kernels of these flags are built.

    3 is float32's precision and the default, 1 is TF32's, and 0 leaves the kernels out. Kernels
    without flags have a macro, too.
    """
    return f"FW_{(terms or 'others').upper()}"


def shares(weights: Sequence[int], most: int) -> list[list[int]]:
    """The indices of these weights in at most `most` parts of about the same weight, each worth a
    compiler of its own."""
    count = max(1, min(most, sum(weights) // WORTH, len(weights)))
    held: list[list[int]] = [[] for _ in range(count)]
    for at in sorted(range(len(weights)), key=lambda at: -weights[at]):
        min(held, key=lambda part: sum(weights[each] for each in part)).append(at)
    return [sorted(part) for part in held]


@dataclass(frozen=True)
class Piece:
    """The text of a kernel, its share of the compile time, and the macro that is 0 if the kernel is
    left out."""

    text: str
    weight: int
    macro: str


@dataclass(frozen=True)
class Source:
    """`language` is cuda or host. `text` includes only headers of the standard toolchain.

    `pieces` are the kernels. Each can be compiled without the others. `kernels` is what people
    read: what is computed. `support` is everything else, with `KERNELS_LINE` where `kernels` stands
    in `text`.
    """

    language: str
    text: str
    entries: tuple[Entry, ...]
    pieces: tuple[Piece, ...] = ()
    kernels: str = ""
    support: str = ""

    @property
    def halves(self) -> tuple[str, str]:
        """`kernels` and `support`. A text that has no such halves is all support code."""
        return self.kernels, self.support or self.text + KERNELS_LINE

    def divided(self, most: int) -> list[Source]:
        """At most `most` sources of about the same weight, which together have all kernels."""
        built = [each for each in self.pieces if f"#define {each.macro} 0\n" not in self.text]
        parts = shares([each.weight for each in built], most)
        held = [{built[at] for at in part} for part in parts]
        return [self._without(set(self.pieces) - part) for part in held]

    def _without(self, pieces: set[Piece]) -> Source:
        text = self.text
        for piece in pieces:
            text = text.replace(piece.text, "", 1)
        return replace(self, text=text)
