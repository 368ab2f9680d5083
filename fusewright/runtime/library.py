"""The compiled kernels of one source text: built or found in the cache at first use, then bound.

The cache is a folder that belongs to the user. A library's file name has a digest of everything it
was built from and a digest of its own bytes, so one rename publishes it and damage is noticed.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import shlex
import tempfile
import typing

import torch

_fw_call = typing.Callable[..., typing.Any]
_fw_threads = torch.get_num_threads


def _fw_current_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# The private lookup takes 0.1 µs; the public one builds an object and takes 3 µs.
_fw_stream: _fw_call = getattr(torch._C, "_cuda_getCurrentRawStream", _fw_current_stream)

# What code by torch.compile calls; a PyTorch without it uses the public functions.
_fw_compiled: typing.Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
# Allocation in 0.6 µs; torch.empty_strided takes 1.3. On a GPU only for the current device.
_fw_allocate = typing.Callable[..., torch.Tensor] | None
_fw_empty_host: _fw_allocate = getattr(_fw_compiled, "_empty_strided_cpu", None)
_fw_empty_cuda: _fw_allocate = getattr(_fw_compiled, "_empty_strided_cuda", None)
_fw_current_device: _fw_call = getattr(torch._C, "_cuda_getDevice", lambda: -1)


def _fw_host_strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


# A new tensor for a host kernel to write; unlike `_fw_memory` it takes no device.
_fw_host_memory: _fw_call = _fw_empty_host or _fw_host_strided


def _fw_memory(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A new tensor for a kernel to write."""
    if device.type == "cpu":
        if _fw_empty_host:
            return _fw_empty_host(shape, strides, dtype)
    elif _fw_empty_cuda and device.index == _fw_current_device():
        return _fw_empty_cuda(shape, strides, dtype)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


class _FwAddress(int):
    """The address of a value that follows another one in the same allocation."""

    data_ptr = int.__int__


class _FwMethod(ctypes.Structure):
    """Python's own record of a built-in function (PyMethodDef)."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("text", ctypes.c_char_p),
    )


_FW_FASTCALL = 0x80  # the function takes an array of arguments and its length


def _fw_builtin(library: typing.Any, name: str, rarely: _fw_call | None = None) -> _fw_call:
    """The entry point as a built-in function of tensors, sizes, workspace, device and stream. If
    the library lacks the kernel for a call, the function makes the call with `rarely`."""
    address = ctypes.cast(getattr(library, f"{name}_called"), ctypes.c_void_p)
    method = _FwMethod(name.encode(), address, _FW_FASTCALL, None)
    # Kept for the life of the process, as libraries are. The function may outlive this module, and
    # Python reads its record even while it deletes it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(method))
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    make = kind(("PyCFunction_NewEx", ctypes.pythonapi))
    function: _fw_call = make(ctypes.addressof(method), rarely, None)
    return function


def _fw_rarely(load: _fw_call, name: str) -> _fw_call:
    """An entry point for calls that need a kernel for misaligned or huge tensors.

    Such kernels would double the time of a build, so the first call that needs one builds them.
    """
    whole = functools.cache(lambda: _fw_builtin(load(), name))
    return lambda *given: whole()(*given)


def _fw_bound(load: _fw_call, text: str, names: typing.Iterable[str]) -> dict[str, _fw_call]:
    """The entry points of a text, without the kernels that few calls need."""
    few = "FW_RARE" in text
    library = load("#define FW_RARE 0\n" + text if few else text)
    whole = functools.cache(lambda: load(text))
    rarely = {name: _fw_rarely(whole, name) if few else None for name in names}
    return {name: _fw_builtin(library, name, other) for name, other in rarely.items()}


_fw_profiler: typing.Any = torch.autograd.profiler
_fw_range: _fw_call = getattr(
    torch._C._profiler, "_RecordFunctionFast", torch.autograd.profiler.record_function
)


class _FwNamed:
    """An entry point whose calls the profiler shows under its name.

    It stands where the entry point was. A call after the profiler has stopped puts that back.
    """

    def __init__(self, place: dict[typing.Any, typing.Any], key: typing.Any, name: str) -> None:
        self.place, self.key, self.name, self.entry = place, key, name, place[key]

    def __call__(self, *given: typing.Any) -> None:
        if _fw_profiler._is_profiler_enabled:
            with _fw_range(self.name):
                self.entry(*given)
        else:
            self.place[self.key] = self.entry
            self.entry(*given)


def _fw_show(driver: typing.Any) -> None:
    """While PyTorch's profiler runs, let it see the kernels that a driver calls.

    Nobody tells us when it starts, and a range for each call would cost 0.4 µs. So this is asked
    once for each driver, in 0.03 µs.
    """
    kernels = driver.__globals__.get("_fw_kernels")
    held = {} if kernels is None else vars(kernels)
    for name in held.get("_entries", ()):
        # If PyTorch's flags decide how precise an entry point is, there are several.
        inside = isinstance(held.get(name), dict)
        place = held[name] if inside else held
        for key in [*place] if inside else [name] if name in held else []:
            if not isinstance(place[key], _FwNamed):
                place[key] = _FwNamed(place, key, name)


class _FwKernels:
    """The C entry points as attributes: the names in `entries`. `load` opens the library of a
    text."""

    def __init__(self, entries: dict[str, str], text: str, load: _fw_call) -> None:
        self._entries, self._text, self._load = entries, text, load

    def __getattr__(self, name: str) -> typing.Any:
        # Called at first use only: binding makes each entry point a plain attribute.
        if name.startswith("__") or name not in self._entries:
            raise AttributeError(name)
        self.build()
        return self.__dict__[name]

    def build(self) -> None:
        """Build and bind the library."""
        self.__dict__.update(_fw_bound(self._load, self._text, self._entries))


def _fw_wanted(
    wanted: bool,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """Memory for an output, or None if it is not wanted."""
    return _fw_memory(shape, strides, dtype, device) if wanted else None


def _fw_cache_folder() -> pathlib.Path:
    """A folder that only this user can write; a temporary one if no lasting one is possible."""
    chosen = os.environ.get("FUSEWRIGHT_CACHE")
    folder = pathlib.Path(chosen) if chosen else pathlib.Path.home() / ".cache" / "fusewright"
    standing = folder.absolute()
    while not standing.exists():
        standing = standing.parent
    if not (standing.is_dir() and os.access(standing, os.W_OK | os.X_OK)):
        return pathlib.Path(tempfile.mkdtemp(prefix="fusewright-"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise RuntimeError(
            f"other users can write to {folder}; run `chmod 700 {shlex.quote(str(folder))}` or set "
            "FUSEWRIGHT_CACHE to your own folder"
        )
    return folder


def _fw_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


# Stands before each group of kernels that a compiler of its own may take.
_FW_CUT = "// Kernels that can be compiled apart from the others:\n"


def _fw_cores() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _fw_divided(text: str, folder: pathlib.Path, suffix: str) -> list[str]:
    """Files that together have all kernels of the text, one for each compiler."""
    shared, *groups = text.split(_FW_CUT)
    count = max(1, min(len(groups), _fw_cores()))
    files = [folder / f"part_{at}{suffix}" for at in range(count)]
    for at, file in enumerate(files):
        file.write_text(shared + "".join(groups[at::count]), encoding="utf-8")
    return [str(file) for file in files]


def _fw_loader(recipe: _fw_call, build: _fw_call) -> _fw_call:
    """A function that opens the library of a text and builds it first if it is missing."""
    return lambda text: ctypes.CDLL(str(_fw_library(text, recipe(), build)))


def _fw_library(text: str, recipe: list[str], build: _fw_call) -> pathlib.Path:
    """The file of the library; `recipe` is everything but the text that decides its bytes."""
    key = _fw_digest("\0".join([text, *recipe]).encode())
    folder = _fw_cache_folder()
    for found in sorted(folder.glob(f"emitted-{key}-*.so")):
        if found.stem.endswith(_fw_digest(found.read_bytes())):
            return found
    # Each build has its own folder: the lock of a killed build cannot block another one.
    # Ninja may still write there after an interrupt.
    apart = tempfile.TemporaryDirectory(prefix="build-", dir=folder, ignore_cleanup_errors=True)
    with apart as scratch:
        build(text, f"fw_{key}", pathlib.Path(scratch))
        built = next(pathlib.Path(scratch).glob("*.so"))
        kept = folder / f"emitted-{key}-{_fw_digest(built.read_bytes())}.so"
        built.replace(kept)
    return kept
