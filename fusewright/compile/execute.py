"""Executes an emitted text over the run time and its kernels."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from typing import Any

import torch

from fusewright.runtime import (
    altered,
    call,
    guard,
    library,
    operators,
    recurrent,
    states,
    tensor_cores,
)


def executed(
    text: str, kernels: library._FwKernels, name: str, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The names that an emitted text defines, over the run time and these kernels."""
    namespace: dict[str, Any] = {}
    for part in (library, guard, altered, call, states, operators, tensor_cores, recurrent):
        namespace.update({k: v for k, v in vars(part).items() if k.lower().startswith("_fw")})
    namespace.update({"torch": torch, "_fw_kernels": kernels, **(more or {})})
    name = f"<fusewright {name} {hashlib.sha256(text.encode()).hexdigest()[:8]}>"
    # Tracebacks then show the driver's lines.
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), namespace)
    return namespace
