"""The standalone file: the user's source, the kernels, ModelNew, and then the support code.

The support code is the same kind of text in every file: the run time (`support`), the kernels'
drivers, and the tables that connect both with the model. All our names begin with `_`, except the
wrappers (`custom_…`) and ModelNew, and none is a name of the user's source.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass

from fusewright.codegen.source import KERNELS_LINE
from fusewright.emit.bundle import ModuleBundle, for_all_sizes
from fusewright.emit.edits import lines_of
from fusewright.emit.python import call, plain, quoted
from fusewright.emit.refused_words import respelt, respelt_cpp
from fusewright.emit.support import pasted
from fusewright.emit.text import ModuleText, entries_text, module_text
from fusewright.emit.types import type_lines
from fusewright.emit.user import UserSource, read
from fusewright.emit.wrap import COLUMNS, OFF, ON, wrapped
from fusewright.runtime import BUILDERS, PASTED, RECURRENT, TENSOR_CORES

_MODEL_NEW = '''
class ModelNew({base}):
    """{base} with the kernels above; a call that fits none runs the original forward."""

    def forward(self, *args, **kwargs):
        reason, result = _fw_forward(_FW_MODES, self, args, kwargs)
        if reason is None:
            return result
        _fw_warn(reason)
        return super().forward(*args, **kwargs)
'''
_DEFINITION = re.compile(rf"(?:{OFF}\n)?(?:def |class |@)")
_IMPORT = re.compile("import |from ")
_SUPPORT = "support code: how the kernels are compiled, called and guarded"


def file_text(
    bundle: ModuleBundle,
    user_source: str,
    header: str,
    *,
    keep_words: bool = False,
    base: str = "Model",
) -> str:
    """The emitted file. `header` says what it is and what was measured; `base` is the user's class.

    Strict public checkers of kernels refuse the words `pass`, `try` and `except`. They are spelt
    in another way unless `keep_words` is set.
    """
    parts = _parts(bundle, read(user_source), header, keep_words, base)
    return f"{parts.model}\n\n{_rule(_SUPPORT)}\n{parts.support}"


def split_texts(
    bundle: ModuleBundle, user_source: str, header: str, beside: str, *, keep_words: bool = False
) -> tuple[str, str]:
    """The same as two files: the model's, and its support code in a file `beside` it."""
    parts = _parts(bundle, read(user_source), header, keep_words)
    name = quoted(beside)
    lines = [
        _rule(f"support code: in {plain(beside)}"),
        "import pathlib as _fw_pathlib",
        "",
        f"_FW_BESIDE = _fw_pathlib.Path(__file__).with_name({name})",
        'exec(compile(_FW_BESIDE.read_text(encoding="utf-8"), str(_FW_BESIDE), "exec"))',
    ]
    words = "Support code of the model file beside it, which executes it in its own namespace."
    return f"{parts.model}\n\n" + "\n".join(lines) + "\n", f'"""{words}"""\n\n{parts.support}'


@dataclass(frozen=True)
class _Parts:
    """The part that is about the model, and the support code."""

    model: str
    support: str


def _parts(
    bundle: ModuleBundle, user: UserSource, header: str, keep_words: bool, base: str = "Model"
) -> _Parts:
    text = module_text(for_all_sizes(bundle), user.names)
    model_new = _MODEL_NEW.format(base=base)
    imports, runtime = _runtime(bundle, text, model_new)
    modules = {line.removeprefix("import ") for line in imports if line.startswith("import ")}
    clashes = user.bound & modules
    halves = (each if keep_words else respelt_cpp(each) for each in bundle.source.halves)
    kernels, drivers = map(_literal, halves)
    own = _joined([f"_FW_KERNELS = {kernels}", _unformatted(text.drivers), model_new.strip("\n")])
    imports = [f"{line} as _fw_{line[7:]}" if line[7:] in clashes else line for line in imports]
    torch = next(line for line in imports if line.startswith("import torch"))
    blocks = [
        f"_FW_DRIVERS = {drivers}",
        *runtime,
        _unformatted("\n".join(wrapped(_loaded(bundle))) + "\n\n\n" + text.tables),
    ]
    ours = [_renamed(part, clashes) for part in (own, _joined(blocks))]
    ours[1] = _joined(["\n".join([*imports, *type_lines(bundle.modes)]), ours[1].rstrip("\n")])
    words = _docstring(header)
    docstring = f'"""{words}\n"""\n' if "\n" in words else f'"""{words}"""\n'
    parts = [docstring, user.rest.strip("\n") + "\n", *ours]
    if not keep_words:
        parts = [respelt(part) for part in parts]
    top = "\n".join([parts[0], *user.future, *(["", ""] if user.future else []), parts[1]])
    first = "" if re.search(r"^import torch$", user.rest, re.MULTILINE) else f"{torch}\n\n"
    return _Parts(f"{top}\n\n{_rule('the fused kernels')}\n{first}{parts[2]}", parts[3])


def _runtime(bundle: ModuleBundle, text: ModuleText, new: str) -> tuple[list[str], list[str]]:
    """The imports and definitions of the run time that this text needs."""
    modules = (*PASTED, TENSOR_CORES, RECURRENT, *BUILDERS[bundle.language])
    used = " ".join([text.drivers, text.tables, new, *_loaded(bundle)])
    return pasted(modules, used, text.facts)


def _unformatted(text: str) -> str:
    """Lines that ruff would spread over many more."""
    return "\n".join([OFF, text.strip("\n"), ON])


def _loaded(bundle: ModuleBundle) -> list[str]:
    """The lines that make `_fw_kernels`."""
    kind = "_FwPreciseKernels" if bundle.has_tensor_core_steps else "_FwKernels"
    source = f"_FW_DRIVERS.replace({quoted(KERNELS_LINE)}, _FW_KERNELS, 1)"
    given = ["_FW_ENTRIES", source, "_fw_loader(_fw_recipe, _fw_build)"]
    return [f"_FW_ENTRIES = {entries_text(bundle)}", *call("_fw_kernels", kind, given)]


def _joined(blocks: Iterable[str]) -> str:
    """Statements with ruff's blank lines: two around functions and classes, one after imports."""
    text, before = "", ""
    for block in blocks:
        alone = _DEFINITION.match(block) or _DEFINITION.match(before)
        gap = 3 if alone else 2 if _IMPORT.match(before) else 1
        text += "\n" * (gap if before else 0) + block
        before = block
    return text + "\n"


def _rule(title: str) -> str:
    return f"# ---- {title} ".ljust(COLUMNS, "-")


def _renamed(text: str, clashes: frozenset[str]) -> str:
    """Our text with other names for modules whose names the user's source binds."""
    if not clashes:
        return text
    lines = lines_of(text)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        row, start = token.start
        if token.type == tokenize.NAME and token.string in clashes:
            before, name = lines[row - 1][:start], lines[row - 1][start:]
            lines[row - 1] = before + ("" if before.endswith(".") else "_fw_") + name
    return "".join(lines)


def _literal(text: str) -> str:
    """The source as a raw string, if that can contain it."""
    if '"""' in text or text.endswith(('"', "\\")):
        return quoted(text)
    return f'r"""{text}"""'


def _docstring(header: str) -> str:
    lines = header.strip().splitlines()
    # Lines keep their indentation, because numbers are in columns.
    kept = [re.match(r" *", line).group() + plain(line) for line in lines]  # type: ignore[union-attr]
    return "\n".join(line.rstrip() for line in kept)
