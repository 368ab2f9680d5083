"""The standalone file: the user's source, the run time, the kernels, the module's text, ModelNew.

The run time is the text of `fusewright.runtime`, pasted. All our names begin with `_fw`, `_FW` or
`_Fw`, except the wrappers (`custom_…`) and ModelNew, so they hide no name of the user.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from importlib import resources

from fusewright.emit.bundle import ModuleBundle
from fusewright.emit.edits import lines_of
from fusewright.emit.python import COLUMNS, call, plain, quoted
from fusewright.emit.refused_words import respelt, respelt_cpp
from fusewright.emit.text import entries_text, module_text
from fusewright.emit.types import type_lines
from fusewright.emit.user import read
from fusewright.runtime import BUILDERS, PASTED, RECURRENT, TENSOR_CORES

_MODEL_NEW = '''
class ModelNew(Model):
    """Model with its operators in the kernels above; everything else is inherited."""

    def forward(self, *args, **kwargs):
        reason, result = _fw_forward(_FW_MODES, self, args, kwargs)
        if reason is None:
            return result
        _fw_warn(reason)
        return super().forward(*args, **kwargs)
'''


def file_text(
    bundle: ModuleBundle, user_source: str, header: str, *, keep_words: bool = False
) -> str:
    """The emitted file. `header` says what it is and what was measured.

    Strict public checkers of kernels refuse the words `pass`, `try` and `except`. They are spelt
    in another way unless `keep_words` is set.
    """
    user = read(user_source)
    source = bundle.source.text if keep_words else respelt_cpp(bundle.source.text)
    beside = {TENSOR_CORES: bundle.has_tensor_core_steps, RECURRENT: bundle.has_layers}
    extra = [part for part, needed in beside.items() if needed]
    flags = "_FW_TERMS" if bundle.has_tensor_core_steps else "{}"
    given = ["_FW_ENTRIES", "_FW_SOURCE", flags, "_fw_loader(_fw_recipe, _fw_build)"]
    runtime = [_pasted(part) for part in (*PASTED, *extra, *BUILDERS[bundle.language])]
    modules = [*sorted({name for part in runtime for name in part.modules} - {"torch"}), "torch"]
    ours = [
        _rule("the run time of Fusewright"),
        *(part.text for part in runtime),
        _rule("the kernels"),
        f"_FW_SOURCE = {_kernels_literal(source)}",
        f"_FW_ENTRIES = {entries_text(bundle)}",
        *call("_fw_kernels", "_FwKernels", given),
        "\n\n" + module_text(bundle, user.names).rstrip("\n"),
        _MODEL_NEW.rstrip("\n"),
    ]
    clashes = user.bound & set(modules)
    imports = [f"import {n} as _fw_{n}" if n in clashes else f"import {n}" for n in modules]
    own = [*type_lines(bundle.modes), *imports, _renamed("\n".join(ours), clashes)]
    docstring = f'"""{_docstring(header)}\n"""\n'
    parts = [docstring, user.rest.strip("\n") + "\n\n", "\n".join(own) + "\n"]
    if not keep_words:
        parts = [respelt(part) for part in parts]
    return "\n".join([parts[0], *user.future, *parts[1:]])


def _rule(title: str) -> str:
    return f"\n\n# ---- {title} ".ljust(COLUMNS, "-")


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


def _kernels_literal(text: str) -> str:
    """The source as a raw string, if that can contain it."""
    if '"""' in text or text.endswith(('"', "\\")):
        return quoted(text)
    return f'r"""{text}"""'


@dataclass(frozen=True)
class _Pasted:
    """A module of the run time without its docstring and imports, and the modules it imports."""

    text: str
    modules: tuple[str, ...]


def _pasted(name: str) -> _Pasted:
    source = resources.files("fusewright.runtime").joinpath(f"{name}.py").read_text()
    lines = source.splitlines()
    modules: list[str] = []
    for node in ast.parse(source).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        sibling = isinstance(node, ast.ImportFrom) and str(node.module).startswith("fusewright")
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        if docstring or sibling or isinstance(node, ast.Import):
            for index in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[index] = ""
    return _Pasted("\n\n" + "\n".join(lines).strip("\n"), tuple(modules))


def _docstring(header: str) -> str:
    lines = header.strip().splitlines()
    # Lines keep their indentation, because numbers are in columns.
    kept = [re.match(r" *", line).group() + plain(line) for line in lines]  # type: ignore[union-attr]
    return "\n".join(line.rstrip() for line in kept)
