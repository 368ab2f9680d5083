"""Every error that Fusewright raises on purpose: one class per mistake, one tree.

Each message says what happened, where, and what the reader can do about it.
"""

from __future__ import annotations


class FusewrightError(Exception):
    """The root: `except FusewrightError` catches all that is ours."""


class ProblemError(FusewrightError):
    """The problem file cannot be used as it is; the message names its file and line."""


class OutputError(FusewrightError):
    """What was to be written would destroy something of the user's."""


class CaptureError(FusewrightError):
    """The model cannot be turned into a graph; the message names the model's file and line."""


class GraphError(FusewrightError):
    """A stage broke a rule of the graph language: a bug in Fusewright, worth a report."""


class CodegenError(FusewrightError):
    """A kernel was described that cannot be written as source: a bug, worth a report."""


class BuildError(FusewrightError):
    """The root of what goes wrong between source text and a loaded library."""


class CompilerMissing(BuildError):
    """No compiler was found; the message says which one and how to name another."""


class CompileFailed(BuildError):
    """The compiler refused the source; the message holds its command and its words."""


class CacheUnusable(BuildError):
    """The cache folder cannot be trusted or written; the message says how to choose another."""


class VerifyError(FusewrightError):
    """A candidate cannot be compared with the model: other parameters, other outputs."""


class DeviceError(FusewrightError):
    """The device that was asked for is not there."""
