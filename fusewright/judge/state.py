"""What a candidate could change for everyone in its process: flags, modes, functions.

The candidate's process reads all of it before the candidate is loaded and after every call, and
sends it to the judge.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import hashlib
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.verify.flags import flags

# Functions that measure, compare or carry results. No kernel needs to replace one of them.
_WATCHED: dict[Any, str] = {
    time: "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time sleep",
    torch: "allclose isclose equal eq norm dist abs sub all any max get_rng_state "
    "empty full zeros frombuffer no_grad enable_grad set_grad_enabled is_tensor",
    torch.linalg: "norm vector_norm matrix_norm",
    importlib.import_module("torch.testing"): "assert_close",
    torch.autograd: "grad backward",
    torch.cuda: "synchronize Event current_stream",
    Tensor: "detach contiguous data_ptr untyped_storage clone copy_ resolve_conj resolve_neg numel "
    "__eq__ __ne__ __sub__ __bool__ allclose isclose equal norm abs sub all any max item tolist "
    "is_contiguous stride size requires_grad_ backward set_ nbytes shape dtype layout",
    nn.Module: "__call__ train eval parameters named_parameters named_buffers state_dict",
    json: "dumps loads",
    ctypes: "string_at",
    hashlib: "blake2b",
    os: "_exit read write close",
    sys: "exit settrace setprofile",
    gc: "collect get_objects",
    builtins: "isinstance type len id sum all any min max getattr setattr bytes bytearray range",
}
_DENORMAL = 1e-40


def function_watch() -> Callable[[], list[str]]:
    """A function that names everything that was replaced since now."""

    def found() -> Iterator[tuple[str, object, str, object]]:
        for owner, names in _WATCHED.items():
            label = owner.__name__ if not isinstance(owner, type) else owner.__qualname__
            for name in names.split():
                yield f"{label}.{name}", owner, name, getattr(owner, name, None)

    before = list(found())
    read = getattr

    def replaced() -> list[str]:
        return [label for label, owner, name, old in before if read(owner, name, None) is not old]

    return replaced


def global_state() -> dict[str, str]:
    """The flags, modes and defaults that a call must leave as they are, as text."""
    tiny = torch.full((8,), _DENORMAL)
    return {
        **flags(),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "working folder": str(Path.cwd()),
        "grad mode": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "autocast": str([torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]),
        "anomaly mode": str(torch.is_anomaly_enabled()),
        "hooks of all modules": str(_global_hooks()),
        "denormal numbers": "kept" if bool((tiny * 0.5 != 0).all()) else "flushed to zero",
        "function modes": str(torch._C._len_torch_function_stack()),
        "dispatch modes": str(torch._C._len_torch_dispatch_stack()),
        "trace function": str(sys.gettrace() is not None or sys.getprofile() is not None),
        "warnings": "all ignored" if _ignores_all() else "shown",
    }


def _global_hooks() -> int:
    """How many hooks run for every module of the process."""
    found = vars(torch.nn.modules.module)
    names = (name for name in found if name.startswith("_global_") and name.endswith("_hooks"))
    return sum(len(found[name]) for name in names)


def _ignores_all() -> bool:
    """Whether one filter silences every warning; libraries add narrower ones when they load."""
    every = ("ignore", None, Warning, None, 0)
    return any(tuple(each) == every for each in warnings.filters)


def held_tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of everything that a module holds, each tensor once.

    A candidate may override `named_parameters`, so the modules' own tables are read.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        prefix, module = waiting.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        for kind in ("parameter", "buffer"):
            for name, each in vars(module)[f"_{kind}s"].items():
                if each is not None and id(each) not in seen:
                    seen.add(id(each))
                    yield kind, prefix + name, each
        inner = [(f"{prefix}{name}.", each) for name, each in vars(module)["_modules"].items()]
        waiting[:0] = [(name, each) for name, each in inner if each is not None]


def digest(described: list[tuple[str, bytes]]) -> str:
    """One figure for names and values; equal only if all are."""
    total = hashlib.blake2b(digest_size=16)
    for name, values in described:
        total.update(f"{name}:{len(values)}:".encode())
        total.update(values)
    return total.hexdigest()
