"""Functions that a file must leave as they are, because others in its process use them, too.

The launcher notes all of them before the candidate is loaded, and compares after every request.
"""

from __future__ import annotations

import builtins
import copy
import ctypes
import gc
import hashlib
import importlib
import json
import os
import pickle
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_module = importlib.import_module
# Functions that measure, compare, copy or carry results. No kernel needs to replace one of them.
_WATCHED: dict[Any, str] = {
    time: "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time sleep "
    "process_time_ns thread_time clock_gettime",
    torch: "allclose isclose equal eq norm dist abs sub all any max get_rng_state "
    "empty full zeros frombuffer no_grad enable_grad set_grad_enabled is_tensor",
    torch.linalg: "norm vector_norm matrix_norm",
    _module("torch.testing"): "assert_close",
    _module("torch.autograd.gradcheck"): "gradcheck gradgradcheck",
    torch.autograd: "grad backward gradcheck gradgradcheck",
    torch.autograd.Function: "apply",
    torch.cuda: "synchronize Event current_stream",
    torch.cuda.Event: "elapsed_time record synchronize query",
    torch.optim.SGD: "step zero_grad",
    torch.optim.Adam: "step zero_grad",
    torch.optim.AdamW: "step zero_grad",
    Tensor: "data_ptr untyped_storage nbytes shape dtype layout device data grad grad_fn is_leaf "
    "requires_grad _version",
    json: "dumps loads",
    copy: "copy deepcopy",
    pickle: "dump dumps load loads Pickler Unpickler",
    statistics: "mean fmean median stdev pstdev quantiles",
    timeit: "default_timer timeit repeat Timer",
    ctypes: "string_at",
    hashlib: "blake2b",
    os: "_exit read write close",
    sys: "exit settrace setprofile",
    gc: "collect get_objects",
    builtins: "__import__ __build_class__",
}
_OF_NUMPY = {"numpy": "allclose isclose array_equal", "numpy.testing": "assert_allclose"}
# PyTorch's operators by the names that models use.
_OPERATORS = (torch, torch.nn.functional, torch.linalg, torch.special, torch.fft)
_WHOLE = (Tensor, nn.Module)
# PyTorch's compiler replaces these two when it is first used.
_OF_DYNAMO = ("__init__", "__setstate__")


def function_watch() -> Callable[[], list[str]]:
    """A function that names everything that was replaced since now."""
    before = list({each[0]: each for each in _found()}.values())
    owners = {each[1]: None for each in before if isinstance(each[1], ModuleType)}
    read, modules = _read, sys.modules

    def replaced() -> list[str]:
        functions = [
            label
            for label, owner, name, old in before
            if (now := read(owner, name)) is not old and not _is_same(now, old)
        ]
        others = (each.__name__ for each in owners if modules.get(each.__name__) is not each)
        return [*functions, *others]

    return replaced


def _found() -> Iterator[tuple[str, Any, str, object]]:
    for owner, name in (*_named(), *_operators()):
        value = _read(owner, name)
        if _read(owner, name) is value:
            yield f"{_label(owner)}.{name}", owner, name, value


def _read(owner: Any, name: str) -> object:
    """A function of a module or class; of a class method the function itself."""
    found = getattr(owner, name, None)
    return getattr(found, "__func__", found)


def _named() -> Iterator[tuple[Any, str]]:
    for owner, names in _WATCHED.items():
        yield from ((owner, name) for name in names.split())
    for module, names in _OF_NUMPY.items():
        with suppress(ImportError):
            owner = importlib.import_module(module)
            yield from ((owner, name) for name in names.split())
    for name, each in vars(builtins).items():
        if callable(each) and not name.startswith("_") and not _is_error(each):
            yield builtins, name


def _is_error(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseException)


def _operators() -> Iterator[tuple[Any, str]]:
    """Operators, all methods of tensors and modules, and the forward of PyTorch's modules."""
    for owner in _OPERATORS:
        public = (name for name in list(vars(owner)) if not name.startswith("_"))
        yield from ((owner, name) for name in public if _is_function(owner, name))
    for whole in _WHOLE:
        for name in dir(whole):
            special = name.startswith("__") and name not in _OF_DYNAMO
            if (special or not name.startswith("_")) and _is_function(whole, name):
                yield whole, name
    for each in vars(nn).values():
        if isinstance(each, type) and issubclass(each, nn.Module) and "forward" in vars(each):
            yield each, "forward"


def _is_function(owner: Any, name: str) -> bool:
    found = getattr(owner, name, None)
    return callable(found) and not isinstance(found, type)


def _label(owner: Any) -> str:
    return owner.__qualname__ if isinstance(owner, type) else owner.__name__


def _is_same(now: object, old: object) -> bool:
    """PyTorch's own compiler wraps some functions when it is first imported."""
    kept = getattr(now, "_torchdynamo_orig_callable", getattr(now, "__wrapped__", None))
    module = getattr(now, "__module__", None) or ""
    return old is not None and kept is old and module.partition(".")[0] == "torch"
