"""Every error that Fusewright raises on purpose: one class per mistake, with one base class.

Each message says what happened, where, and what to do about it.
"""

from __future__ import annotations

from typing import Any

_REPORT = "This is a bug in Fusewright: please report it"


class FusewrightError(Exception):
    """The base class: `except FusewrightError` catches all errors of Fusewright."""


class ProblemError(FusewrightError):
    """The problem file cannot be used as it is. The message names the file and the line."""


class OutputError(FusewrightError):
    """The output would overwrite a file of the user."""


class SaveError(FusewrightError):
    """An optimized module cannot be written as one file. The message names the line that forbids
    it, and says what to do."""


class CaptureError(FusewrightError):
    """The model cannot be captured as a graph. The message names the model's file and line."""


class UnguardedError(CaptureError):
    """No trace of the model can stand for its later calls. The message says why.

    `by_dynamo` if Dynamo, with its own guards, can run the model. Each call must then look at what
    Dynamo does not guard: at the places `watched` (see `capture.reads.Watched`), and at what is
    `beside` (capture's `Beside`, or None). The places are those that the `codes` need.
    """

    def __init__(
        self,
        message: str,
        *,
        by_dynamo: bool = True,
        watched: tuple[Any, ...] = (),
        beside: object = None,
        codes: frozenset[Any] = frozenset(),
    ) -> None:
        super().__init__(message)
        self.by_dynamo = by_dynamo
        self.watched = watched
        self.beside = beside
        self.codes = codes


class LeftToEagerError(CaptureError):
    """A real call differs from what a graph says, or needs what no graph has. The message says in
    what. The original forward is right for such calls."""


class InternalError(FusewrightError):
    """A bug in Fusewright. The message says so, and `__cause__` has the first error, if any."""

    def __str__(self) -> str:
        text = super().__str__()
        first, *rest = text.split("\n", 1)
        asked = first if first.endswith(_REPORT) else f"{first.rstrip('.: ')}. {_REPORT}"
        return "\n".join((asked, *rest))


class GraphError(InternalError):
    """A graph breaks a rule of the IR."""


class CodegenError(InternalError):
    """A kernel cannot be written as source."""


class BuildError(FusewrightError):
    """The base class of errors between source text and a loaded library."""


class CompilerMissing(BuildError):
    """No compiler was found. The message names the missing one and says how to choose another."""


class CompileFailed(BuildError):
    """The compiler rejected the source. The message contains its command and its output."""


class CacheUnusable(BuildError):
    """The cache folder is unsafe or not writable. The message says how to choose another."""


class VerifyError(FusewrightError):
    """A candidate cannot be compared with the model: its parameters or outputs differ."""


class DeviceError(FusewrightError):
    """The requested device is not available."""


class ConfinementError(FusewrightError):
    """A stranger's process cannot be confined on this machine. The message says what is missing."""


def first_line(error: BaseException) -> str:
    """The first line of a message: what happened, without the lines of code that follow."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
