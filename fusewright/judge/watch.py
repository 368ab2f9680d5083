"""Functions that a file must leave as they are, because others in its process use them, too.

The launcher notes all of them before the candidate is loaded, and compares after every request.
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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

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


def function_watch() -> Callable[[], list[str]]:
    """A function that names everything that was replaced since now."""
    before = list({each[0]: each for each in _found()}.values())
    read = getattr

    def replaced() -> list[str]:
        return [
            label
            for label, owner, name, old in before
            if (now := read(owner, name, None)) is not old and not _is_same(now, old)
        ]

    return replaced


def _found() -> Iterator[tuple[str, Any, str, object]]:
    for owner, names in _WATCHED.items():
        for name in names.split():
            yield f"{_label(owner)}.{name}", owner, name, getattr(owner, name, None)
    for owner, name in _operators():
        yield f"{_label(owner)}.{name}", owner, name, getattr(owner, name, None)


def _operators() -> Iterator[tuple[Any, str]]:
    """PyTorch's operators by the names that models use, and the forward of its modules."""
    for owner in (torch, torch.nn.functional, torch.linalg, torch.special, torch.fft, Tensor):
        for name, each in list(vars(owner).items()):
            if callable(each) and not isinstance(each, type) and not name.startswith("_"):
                yield owner, name
    for each in vars(nn).values():
        if isinstance(each, type) and issubclass(each, nn.Module) and "forward" in vars(each):
            yield each, "forward"


def _label(owner: Any) -> str:
    return owner.__qualname__ if isinstance(owner, type) else owner.__name__


def _is_same(now: object, old: object) -> bool:
    """PyTorch's own compiler wraps some functions when it is first imported."""
    kept = getattr(now, "_torchdynamo_orig_callable", getattr(now, "__wrapped__", None))
    module = getattr(now, "__module__", None) or ""
    return old is not None and kept is old and module.partition(".")[0] == "torch"
