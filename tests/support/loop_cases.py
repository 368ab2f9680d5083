"""Loop kernels that several tests and the loop benchmark share, and a way to run built ones.

Each builder returns a `LoopKernel`; its float64 reference stands in the test that uses it.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fusewright.codegen.render import render
from fusewright.codegen.source import Entry, Source
from fusewright.ir.graph import Dim, Ratio, contiguous_strides, dim
from fusewright.ir.loop import (
    Access,
    Apply,
    Argument,
    Axis,
    Constant,
    Instruction,
    Load,
    LoopKernel,
    Reduce,
    Scan,
    Store,
)
from fusewright.schedule.choice import Schedule
from fusewright.schedule.loops import choose
from fusewright.target.target import Target
from tests.support.precompiled import folder, included

GXX = (
    "g++ -std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=off "
    "-fopenmp -shared -fPIC"
).split()
# Kernels on fibers: most of the time would be the optimiser's.
EMULATED = ("-Og", "-w")
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
Size = Dim | int


def axes(*sizes: Size, letter: str = "a") -> tuple[Axis, ...]:
    return tuple(Axis(f"{letter}{at}", dim(size)) for at, size in enumerate(sizes))


def access(buffer: str, *strides: Size, offset: Sequence[Size] = ()) -> Access:
    return Access(buffer, tuple(map(dim, strides)), tuple(map(dim, offset)))


def row_major(buffer: str, *sizes: Size) -> Access:
    return Access(buffer, contiguous_strides(tuple(map(dim, sizes))))


def arguments(inputs: Mapping[str, str], outputs: Mapping[str, str]) -> tuple[Argument, ...]:
    read = tuple(Argument(name, dtype, False) for name, dtype in inputs.items())
    return read + tuple(Argument(name, dtype, True) for name, dtype in outputs.items())


def symbols_of(sizes: Sequence[Size]) -> tuple[str, ...]:
    return tuple(sorted({name for size in sizes for name in dim(size).symbols}))


def kernel(
    name: str,
    outer: Sequence[Size],
    inner: Sequence[Size],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    body: Sequence[Instruction],
) -> LoopKernel:
    return LoopKernel(
        name,
        f"{name}: a test",
        axes(*outer, letter="o"),
        axes(*inner, letter="r"),
        arguments(inputs, outputs),
        symbols_of([*outer, *inner]),
        tuple(body),
    )


def add_relu(n: Size, dtype: str = "float32") -> LoopKernel:
    """y = relu(a + b), flat."""
    body = [
        Load("a", dtype, access("a", 1)),
        Load("b", dtype, access("b", 1)),
        Apply("s", dtype, "add", ("a", "b")),
        Apply("y", dtype, "relu", ("s",)),
        Store("y", dtype, access("y", 1)),
    ]
    return kernel("add_relu", [n], [], {"a": dtype, "b": dtype}, {"y": dtype}, body)


def bias_relu(rows: Size, columns: Size, dtype: str = "float32") -> LoopKernel:
    body = [
        Load("x", dtype, row_major("x", rows, columns)),
        Load("b", dtype, access("b", 0, 1)),
        Apply("s", dtype, "add", ("x", "b")),
        Apply("y", dtype, "relu", ("s",)),
        Store("y", dtype, row_major("y", rows, columns)),
    ]
    return kernel("bias_relu", [rows, columns], [], {"x": dtype, "b": dtype}, {"y": dtype}, body)


def softmax(rows: Size, columns: Size, dtype: str = "float32") -> LoopKernel:
    body = [
        Load("x", dtype, row_major("x", rows, columns)),
        Reduce("x_max", dtype, "max", "x"),
        Apply("shifted", dtype, "sub", ("x", "x_max")),
        Apply("power", dtype, "exp", ("shifted",)),
        Reduce("total", dtype, "sum", "power"),
        Apply("y", dtype, "div", ("power", "total")),
        Store("y", dtype, row_major("y", rows, columns)),
    ]
    return kernel("softmax", [rows], [columns], {"x": dtype}, {"y": dtype}, body)


def layer_norm(rows: Size, columns: Size, dtype: str = "float32") -> LoopKernel:
    """Mean and reciprocal deviation are stored too, as the backward pass wants them."""
    share = Ratio(f"1.0/({columns})")
    body = [
        Load("x", dtype, row_major("x", rows, columns)),
        Load("weight", dtype, access("weight", 0, 1)),
        Load("bias", dtype, access("bias", 0, 1)),
        Constant("share", "float32", share),
        Constant("eps", "float32", 1e-5),
        Reduce("mean", "float32", "welford", "x", "m2"),
        Apply("var", "float32", "mul", ("m2", "share")),
        Apply("safe", "float32", "add", ("var", "eps")),
        Apply("rstd", "float32", "rsqrt", ("safe",)),
        Apply("centered", "float32", "sub", ("x", "mean")),
        Apply("normal", "float32", "mul", ("centered", "rstd")),
        Apply("scaled", "float32", "mul", ("normal", "weight")),
        Apply("y", "float32", "add", ("scaled", "bias")),
        Store("y", dtype, row_major("y", rows, columns)),
        Store("mean", "float32", access("mean_out", 1, 0)),
        Store("rstd", "float32", access("rstd_out", 1, 0)),
    ]
    outputs = {"y": dtype, "mean_out": "float32", "rstd_out": "float32"}
    inputs = {"x": dtype, "weight": dtype, "bias": dtype}
    return kernel("layer_norm", [rows], [columns], inputs, outputs, body)


def extremes(rows: Size, columns: Size, dtype: str) -> LoopKernel:
    """The largest of a row's halves, as floats, and the smallest, as they are."""
    body = [
        Load("x", dtype, row_major("x", rows, columns)),
        Apply("wide", "float32", "cast", ("x",)),
        Reduce("most", "float32", "max", "wide"),
        Reduce("least", dtype, "min", "x"),
        Store("most", "float32", access("most", 1, 0)),
        Store("least", dtype, access("least", 1, 0)),
    ]
    outputs = {"most": "float32", "least": dtype}
    return kernel("extremes", [rows], [columns], {"x": dtype}, outputs, body)


def rows_with_extremes(columns: int, dtype: str) -> torch.Tensor:
    """Negative numbers, a NaN in either half of a pair, infinities, subnormals, zeros."""
    x = torch.randn(8, columns).to(getattr(torch, dtype)) - 9
    middle = columns // 2
    x[1, middle], x[2, min(middle + 1, columns - 1)] = torch.nan, torch.nan
    x[3], x[4, columns - 1] = -torch.inf, torch.inf
    x[5] = torch.finfo(x.dtype).smallest_normal / 4
    x[6], x[7, middle] = -0.0, 0.0
    return x


def column_sum(rows: Size, columns: Size, dtype: str = "float32") -> LoopKernel:
    """dz = where(z > 0, g, 0), stored, and its sum over the rows."""
    body = [
        Load("z", dtype, access("z", 1, columns)),
        Load("g", dtype, access("g", 1, columns)),
        Constant("zero", dtype, 0.0),
        Apply("open", "bool", "gt", ("z", "zero")),
        Apply("dz", dtype, "where", ("open", "g", "zero")),
        Store("dz", dtype, access("dz", 1, columns)),
        Reduce("total", "float32", "sum", "dz"),
        Store("total", "float32", access("db", 1, 0)),
    ]
    outputs = {"dz": dtype, "db": "float32"}
    return kernel("column_sum", [columns], [rows], {"z": dtype, "g": dtype}, outputs, body)


def row_logsumexp(rows: Size, columns: Size, dtype: str = "float32") -> LoopKernel:
    """In one sweep, as rows are reduced that are too long to be held."""
    body = [
        Load("x", dtype, row_major("x", rows, columns)),
        Reduce("total", dtype, "logsumexp", "x"),
        Store("total", dtype, access("y", 1, 0)),
    ]
    return kernel("row_logsumexp", [rows], [columns], {"x": dtype}, {"y": dtype}, body)


def column_logsumexp(rows: Size, columns: Size, dtype: str = "float32") -> LoopKernel:
    body = [
        Load("x", dtype, access("x", 1, columns)),
        Reduce("total", dtype, "logsumexp", "x"),
        Store("total", dtype, access("y", 1, 0)),
    ]
    return kernel("column_logsumexp", [columns], [rows], {"x": dtype}, {"y": dtype}, body)


def row_scan(
    rows: Size, columns: Size, dtype: str = "float32", kind: str = "sum", backward: bool = False
) -> LoopKernel:
    """y = scan(x + x) + b, where each row has the same b."""
    body = [
        Load("x", dtype, row_major("x", rows, columns)),
        Load("b", dtype, access("b", 0, 1)),
        Apply("twice", dtype, "add", ("x", "x")),
        Scan("scanned", dtype, kind, "twice", backward),
        Apply("y", dtype, "add", ("scanned", "b")),
        Store("y", dtype, row_major("y", rows, columns)),
    ]
    return kernel("row_scan", [rows], [columns], {"x": dtype, "b": dtype}, {"y": dtype}, body)


def column_scan(
    batch: Size, rows: int, columns: int, dtype: str = "float32", backward: bool = False
) -> LoopKernel:
    """Down the columns of each matrix, beside x itself."""
    strides = (rows * columns, 1, columns)
    body = [
        Load("x", dtype, access("x", *strides)),
        Scan("scanned", dtype, "sum", "x", backward),
        Apply("y", dtype, "sub", ("scanned", "x")),
        Store("scanned", dtype, access("s", *strides)),
        Store("y", dtype, access("y", *strides)),
    ]
    outputs = {"s": dtype, "y": dtype}
    return kernel("column_scan", [batch, columns], [rows], {"x": dtype}, outputs, body)


def hard_rows(columns: int, dtype: str) -> torch.Tensor:
    """Rows whose log Σ e^x has a corner or loses digits easily; `columns` are 10 at least."""
    x = torch.randn(16, columns, dtype=torch.float64) * 3
    x[1, 3], x[2, 5], x[3] = torch.inf, torch.nan, -torch.inf
    x[4, 7], x[5, 0], x[5, columns - 1] = -torch.inf, -torch.inf, torch.inf
    x[6, 1], x[6, columns - 2], x[7, 0] = torch.inf, torch.nan, torch.nan
    x[8] = x[8] + 1e4
    x[9] = x[9] - 1e4
    x[10] = x[10] * 1e4
    x[11] = torch.linspace(0, 1, columns)
    x[12] = torch.linspace(50, -50, columns)
    x[13, :-1], x[13, -1] = -torch.inf, -3.25
    x[14], x[14, 2] = -30.0, 0.37
    x[15] = 6e4
    return x.to(getattr(torch, dtype))


def full_sum(n: Size, dtype: str = "float32") -> LoopKernel:
    body = [
        Load("x", dtype, access("x", 1)),
        Reduce("total", dtype, "sum", "x"),
        Store("total", dtype, access("y", 0)),
    ]
    return kernel("full_sum", [], [n], {"x": dtype}, {"y": dtype}, body)


def channel_sum(batch: Size, channels: int, area: int, dtype: str = "float32") -> LoopKernel:
    """NCHW: y = 2·x, stored, and its sum over batch and area for each channel."""
    strides = (area, channels * area, 1)
    body = [
        Load("x", dtype, access("x", *strides)),
        Constant("two", dtype, 2.0),
        Apply("y", dtype, "mul", ("x", "two")),
        Store("y", dtype, access("y", *strides)),
        Reduce("total", "float32", "sum", "y"),
        Store("total", "float32", access("sums", 1, 0, 0)),
    ]
    outputs = {"y": dtype, "sums": "float32"}
    return kernel("channel_sum", [channels], [batch, area], {"x": dtype}, outputs, body)


def compile_source(source: Source, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Build with g++ or nvcc, once per text: who asks for what another process builds waits."""
    cuda = source.language == "cuda"
    gencode = flags or ("-gencode", "arch=compute_90a,code=sm_90a")
    nvcc = [NVCC or "nvcc", "-std=c++17", "-O3", "-fmad=false", *gencode, "-shared"]
    gxx = [*GXX, *flags]
    command = [*nvcc, "-Xcompiler", "-fPIC"] if cuda else [*gxx, *included(tuple(gxx))]
    key = hashlib.sha256(repr((command, source.text)).encode()).hexdigest()[:20]
    library = folder() / f"{key}.so"
    if not library.exists():
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(command, source, library)
    return ctypes.CDLL(str(library))


def _compile(command: Sequence[str], source: Source, library: Path) -> None:
    text = library.with_suffix(".cu" if source.language == "cuda" else ".cpp")
    text.write_text(source.text)
    fresh = library.with_suffix(".tmp")  # nobody finds half a library
    subprocess.run([*command, str(text), "-o", str(fresh)], check=True)
    fresh.rename(library)


def build(
    loop: LoopKernel,
    target: Target,
    sizes: Mapping[str, int] | None = None,
    schedule: Schedule | None = None,
) -> tuple[ctypes.CDLL, Source]:
    picked = schedule or choose(loop, target, sizes or {})
    source = render([(loop, picked)], target)
    return compile_source(source), source


@functools.cache
def together(
    loops: tuple[LoopKernel, ...], flags: tuple[str, ...] = (), **sizes: int
) -> dict[LoopKernel, tuple[ctypes.CDLL, Source]]:
    """Cases of one test as one text for the host: g++ starts and reads the headers once."""
    target = Target.host()
    source, entries = in_one_text([(loop, choose(loop, target, sizes)) for loop in loops], target)
    library = compile_source(source, flags)
    return {
        loop: (library, replace(source, entries=(entry,)))
        for loop, entry in zip(loops, entries, strict=True)
    }


def run_among(
    loops: tuple[LoopKernel, ...],
    loop: LoopKernel,
    tensors: Mapping[str, torch.Tensor | None],
    sizes: Mapping[str, int],
) -> None:
    """One kernel for the host, built with others that run elsewhere at the same sizes."""
    call(*together(loops, **sizes)[loop], tensors, sizes, 2)


def in_one_text(
    picked: Sequence[tuple[LoopKernel, Schedule]], target: Target
) -> tuple[Source, list[Entry]]:
    """Kernels that may have the same names, and the entry that each has got."""
    named = [
        (replace(loop, name=f"{loop.name}_{number}"), schedule)
        for number, (loop, schedule) in enumerate(picked)
    ]
    source = render(named, target)
    entries = {entry.name: entry for entry in source.entries}
    return source, [entries[loop.name] for loop, _ in named]


def run(
    loop: LoopKernel,
    tensors: Mapping[str, torch.Tensor | None],
    sizes: Mapping[str, int] | None = None,
    target: Target | None = None,
    schedule: Schedule | None = None,
    threads: int = 2,
) -> None:
    """Build one kernel and call it on tensors named as its arguments; None is a null pointer."""
    target = target or Target.host()
    library, source = build(loop, target, sizes, schedule)
    call(library, source, tensors, sizes or {}, threads)


def call(
    library: ctypes.CDLL,
    source: Source,
    tensors: Mapping[str, torch.Tensor | None],
    sizes: Mapping[str, int],
    where: int,
) -> None:
    entry = source.entries[0]
    given = [tensors[name] for name in entry.arguments]
    pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in given]
    numbers = [ctypes.c_int64(sizes[name]) for name in entry.symbols]
    device = next((t.device for t in given if t is not None), torch.device("cpu"))
    scratch = torch.empty(max(8, entry.workspace.at(sizes)), dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
    code = getattr(library, entry.name)(
        *pointers,
        *numbers,
        ctypes.c_void_p(scratch.data_ptr()),
        ctypes.c_int(where),
        ctypes.c_void_p(stream),
    )
    library.fw_error_text.restype = ctypes.c_char_p
    assert code == 0, library.fw_error_text(code)
