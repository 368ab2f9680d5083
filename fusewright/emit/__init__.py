"""From a planned module to Python text: what the library runs and what a file carries."""

from fusewright.emit.bundle import Arguments, ModuleBundle, Owner, ProgramPlans
from fusewright.emit.file import file_text
from fusewright.emit.text import module_text

__all__ = ["Arguments", "ModuleBundle", "Owner", "ProgramPlans", "file_text", "module_text"]
