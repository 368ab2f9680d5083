"""What a candidate could change for everyone in its process: flags, modes, defaults.

The candidate's process reads all of it before the candidate is loaded and after every call, and
sends it to the judge.
"""

from __future__ import annotations

import gc
import hashlib
import locale
import logging
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.judge.wire import bytes_of, dtype_name
from fusewright.verify.flags import flags

_DENORMAL = 1e-40
_cuda: Any = torch.backends.cuda
# Keys of the dispatcher that decide how PyTorch's own operators run.
_OWN_KERNELS = tuple(
    f"/{each}"
    for each in "CPU CUDA AutogradCPU AutogradCUDA Autograd CompositeImplicitAutograd".split()
)
_BACKENDS = ("cuda", "mkldnn")
# Other choices of PyTorch that change digits or speed; a version may lack one.
_CHOICES = (
    "blas_preferred_backend linalg_preferred_backend sdp_priority_order nnpack_enabled warnAlways "
    "cpu_allow_fp16_reduced_precision_reduction deterministic_fill_uninitialized_memory "
    "mkldnn_deterministic math_sdp_allow_fp16_bf16_reduction sm_carveout_experimental"
)
_READ = tuple(
    getattr(torch._C, f"_get_{each}")
    for each in _CHOICES.split()
    if hasattr(torch._C, f"_get_{each}")
)
_SIGNALS = sorted(signal.valid_signals())
_TOOLS = 6
_LIMITS = (resource.RLIMIT_STACK, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_CPU)


def global_state(model: nn.Module | None = None) -> dict[str, str]:
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
        **_state_of_autograd(),
        **_state_of_python(),
        **_state_of_gpu(),
        **(_state_of_weights(model) if model is not None else {}),
    }


def _state_of_weights(model: nn.Module) -> dict[str, str]:
    """Hooks and gradients that are left at the weights, where others meet them."""
    left = [
        f"{name}: {len(each._backward_hooks or ())} {len(each._post_accumulate_grad_hooks or ())} "
        f"{each.grad is not None}"
        for kind, name, each in held_tensors(model)
        if kind == "parameter"
    ]
    return {"hooks and gradients of weights": "; ".join(left)}


def _state_of_autograd() -> dict[str, str]:
    kinds = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
    reductions = (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    return {
        "threads of autograd": str(torch._C._is_multithreading_enabled()),
        "hooks of saved tensors": str(torch._C._autograd._top_saved_tensors_default_hooks(True)),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "cudnn": str(torch.backends.cudnn.enabled),
        "kinds of attention": str([getattr(_cuda, f"{each}_enabled")() for each in kinds]),
        "reduced sums": str([getattr(_cuda.matmul, each) for each in reductions]),
        "kernels of PyTorch's operators": str(_own_kernels()),
        "precision of float32": str(_precisions()),
        "libraries and ways": str([read() for read in _READ]),
    }


def _precisions() -> list[str]:
    """Of each back-end and operation; a way beside `float32_matmul_precision`."""
    read = torch._C._get_fp32_precision_getter
    return [read(each, kind) for each in _BACKENDS for kind in ("all", "matmul", "conv", "rnn")]


def _own_kernels() -> list[str]:
    """Kernels that Python has given to ATen's operators."""
    given = (each for each in torch.library._impls if each.endswith(_OWN_KERNELS))
    return sorted(each for each in given if each.startswith("aten/"))


def _state_of_python() -> dict[str, str]:
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy else ("", b"", 0)
    streams = (sys.stdin, sys.stdout, sys.stderr, sys.excepthook, threading.excepthook)
    tools = getattr(sys, "monitoring", None)
    return {
        "random numbers of Python": str(hash(random.getstate())),
        "random numbers of NumPy": str(hash((bytes(drawn[1]), drawn[2]))),
        "streams and excepthook": str([_named(each) for each in streams]),
        "signal handlers": str([_named(signal.getsignal(each)) for each in _SIGNALS]),
        "garbage collector": f"{gc.isenabled()} {gc.get_threshold()}",
        "cores and priority": f"{sorted(os.sched_getaffinity(0))} {os.getpriority(0, 0)}",
        "settings of the process": str(_settings_of_process()),
        "printing and logs": str(_settings_of_output()),
        "errors of NumPy": str(sorted(numpy.geterr().items()) if numpy else ""),
        "monitoring": str([tools.get_tool(each) for each in range(_TOOLS)] if tools else []),
    }


def _settings_of_process() -> list[object]:
    """The switch between threads, the rights of new files, the language, limits of the system."""
    umask = os.umask(0)
    os.umask(umask)
    limits = [resource.getrlimit(each) for each in _LIMITS]
    return [sys.getswitchinterval(), umask, locale.setlocale(locale.LC_NUMERIC), limits]


def _settings_of_output() -> list[object]:
    """How tensors are printed, which logs are off, who shows warnings."""
    shown = vars(torch._tensor_str.PRINT_OPTS)
    return [sorted(shown.items()), logging.root.manager.disable, _named(warnings.showwarning)]


def _named(thing: object) -> str:
    return f"{getattr(thing, '__qualname__', type(thing).__qualname__)} {id(thing)}"


def _state_of_gpu() -> dict[str, str]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    stream = torch.cuda.current_stream()
    return {"current stream": f"{torch.cuda.current_device()} {stream.cuda_stream}"}


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


_KNOWN = frozenset(
    {Tensor, nn.Parameter, nn.Buffer, nn.UninitializedParameter, nn.UninitializedBuffer}
)


def form_of(tensor: Tensor) -> str:
    """What must be the same in a candidate: type, shape, gradient, and the class if it is an own
    one, which could answer the launcher as it likes."""
    form = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    gradient = " with gradient" if tensor.requires_grad else ""
    own = "" if type(tensor) in _KNOWN else f" of class {type(tensor).__qualname__}"
    return form + gradient + own


def saved_forms(model: nn.Module) -> dict[str, str]:
    """What `state_dict` holds, by name: files of weights are written and read with these names."""
    saved = {str(n): each for n, each in model.state_dict().items() if isinstance(each, Tensor)}
    return {name: f"{dtype_name(each.dtype)}{list(each.shape)}" for name, each in saved.items()}


def digest(described: list[tuple[str, bytes]]) -> str:
    """One figure for names and values; equal only if all are."""
    total = hashlib.blake2b(digest_size=16)
    for name, values in described:
        total.update(f"{name}:{len(values)}:".encode())
        total.update(values)
    return total.hexdigest()


def values_digest(tensor: Tensor) -> str:
    """One figure for the values of a tensor."""
    return digest([("", bytes_of(tensor))])


def weights_digest(model: nn.Module) -> str:
    """One figure for the names and values of all parameters, and for who takes gradients."""
    held = ((name, each) for kind, name, each in held_tensors(model) if kind == "parameter")
    return digest([(f"{name} {each.requires_grad}", bytes_of(each)) for name, each in held])
