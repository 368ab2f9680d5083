"""From a planned module to Python text, which the package runs and an emitted file contains."""

from fusewright.emit.file import file_text

__all__ = ["file_text"]
