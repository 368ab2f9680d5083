"""`save`: an optimized module as one file with `ModelNew`, as the command line writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fusewright.compile.engine import Engine, engine_of
from fusewright.compile.explain import breaks_of, is_of_capture, placed
from fusewright.compile.original import original_class
from fusewright.emit.file import file_text
from fusewright.emit.header import kernel_lines, opening_lines
from fusewright.errors import OutputError, ProblemError, SaveError
from fusewright.problem.class_source import ClassSource, class_source
from fusewright.target.device import versions

_NEW = "ModelNew"


def save(module: Any, path: str | Path) -> Path:
    """Write an optimized module as one file with `ModelNew`, which needs PyTorch alone.

    It has the programs of the example call. SaveError if a file cannot tell for which calls they
    are right, or if the class has no source that stands on its own.
    """
    engine, path = engine_of(module), Path(path)
    if engine is None:
        how = "give it the module that fusewright.optimize returned"
        raise ProblemError(f"save cannot write this {type(module).__name__}; {how}")
    if path.suffix != ".py":
        how = "for weights, use torch.save(module.state_dict(), path)"
        raise ProblemError(f"{path}: save writes Python source, so name a .py file; {how}")
    _refuse_unguarded(module, engine)
    kind = original_class(module)
    source = class_source(kind)
    if source.name == _NEW:
        raise SaveError(f"the class {_NEW} is written already; optimize the model it was made from")
    _keep_apart(source, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(engine, source), encoding="utf-8")
    return path


def _text(engine: Engine, source: ClassSource) -> str:
    held = engine.source
    plans = held.bundle.modes
    lines = opening_lines(source.name, held.device, versions(), held.left_out, plans)
    lines += [
        "",
        f"{_NEW} takes the constructor's arguments of {source.name}, and load_state_dict gives it",
        "the weights. Nothing was checked or timed when this file was written.",
        *kernel_lines(plans),
    ]
    return file_text(held.bundle, source.text, "\n".join(lines), base=source.name)


def _refuse_unguarded(module: nn.Module, engine: Engine) -> None:
    if engine.reason and is_of_capture(engine.reason):
        how = "a file needs one graph; use the optimized module in Python"
        raise SaveError(f"{engine.reason}\n{how}")
    if engine.reason:
        lines = [f"{placed(module, engine.reason)}, and a file has no guard for that"]
        lines += [f"{each}, which breaks the graph" for each in breaks_of(module, engine)]
        lines.append(
            "make it a number, a text, a parameter or a buffer of the model, or use the optimized "
            "module in Python"
        )
        raise SaveError("\n".join(lines))
    if engine.source is None:
        how = "call fusewright.optimize again, then save"
        raise SaveError(f"this {type(module).__name__} has no programs: a pickle has none; {how}")


def _keep_apart(source: ClassSource, path: Path) -> None:
    """Never overwrite the user's source."""
    if source.file and path.exists() and source.file.exists() and path.samefile(source.file):
        raise OutputError(f"{path}: this is the source of {source.name}; name another file")
