"""From generated text to programs that run: kernels, built when needed, and Python over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fusewright.build import Artifact, Libraries, build_divided
from fusewright.codegen.source import Source
from fusewright.compile.execute import executed
from fusewright.compile.mistakes import reported
from fusewright.compile.owners import Modes
from fusewright.emit.bundle import ModuleBundle
from fusewright.emit.text import module_text
from fusewright.emit.types import output_types
from fusewright.runtime import library, tensor_cores
from fusewright.target.device import architecture

LoadText = Callable[[str], Any]


def kernels_of(source: Source, load_text: LoadText) -> library._FwKernels:
    """The source's entries. `load_text` builds their libraries when they are needed."""
    entries = {each.name: each.macro for each in source.entries}
    precise = any(each.terms for each in source.entries)
    kind = tensor_cores._FwPreciseKernels if precise else library._FwKernels
    return kind(entries, source.text, load_text)


def loader(source: Source, device: torch.device, built: list[Artifact]) -> LoadText:
    """Builds and loads the libraries of a text of this source. They are added to `built`."""

    def load_text(text: str) -> Libraries:
        found = build_divided(replace(source, text=text), arch=architecture(device))
        built.extend(found)
        return Libraries(found)

    return load_text


def load(bundle: ModuleBundle, kernels: library._FwKernels) -> Modes:
    """Execute the module's text over these kernels."""
    with reported("writing the program"):
        made = module_text(bundle)
        text = f"{made.drivers}\n\n{made.tables}"
        modes: Modes = executed(text, kernels, bundle.name, output_types(bundle.modes))["_FW_MODES"]
        return modes
