"""Loop kernels that the loop benchmark and tests share.

Each builder returns a `LoopKernel`. Its float64 reference is in the benchmark or test that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusewright.ir.graph import HALF_DTYPES, ONE, Dim, Ratio, contiguous_strides, dim
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


def channel_softmax_gradient(
    batch: Size, channels: Size, area: Size, dtype: str = "float32"
) -> LoopKernel:
    """The gradient of f · softmax(x) over channels, written in channels-last; y is the softmax."""
    channels, area = dim(channels), dim(area)
    planes = channels * area, ONE, area
    wide = "float32" if dtype in HALF_DTYPES else dtype
    body = [
        *(Load(each, dtype, access(each, *planes)) for each in ("g", "f", "y")),
        Apply("given", dtype, "mul", ("g", "f")),
        Apply("part", dtype, "mul", ("given", "y")),
        Reduce("total", wide, "sum", "part"),
        Apply("rest", wide, "sub", ("given", "total")),
        Apply("dx", wide, "mul", ("rest", "y")),
        Store("dx", dtype, access("dx", channels * area, channels, ONE)),
    ]
    inputs = dict.fromkeys(("g", "f", "y"), dtype)
    return kernel(
        "channel_softmax_gradient", [batch, area], [channels], inputs, {"dx": dtype}, body
    )


def layer_norm(rows: Size, columns: Size, dtype: str = "float32") -> LoopKernel:
    """Also stores the mean and the reciprocal deviation, as the backward pass needs them."""
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
    """The maximum of each row in float32, and the minimum in the row's own 16-bit dtype."""
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
    """The logsumexp of each row in one sweep, as for rows that are too long for registers."""
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
    """s = the sums down the columns of each matrix, and y = s - x."""
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


def middle_reduction(
    batch: Size, rows: int, columns: int, kind: str = "sum", dtype: str = "float32"
) -> LoopKernel:
    """A reduction over the middle one of three dimensions."""
    body = [
        Load("x", dtype, access("x", rows * columns, 1, columns)),
        *_reduced(kind, dtype),
        Store("result", dtype, access("y", columns, 1, 0)),
    ]
    outer = [batch, columns]
    return kernel(f"middle_{kind}", outer, [rows], {"x": dtype}, {"y": dtype}, body)


def _reduced(kind: str, dtype: str) -> list[Instruction]:
    """`result` from x, in float32 if x has 16 bits."""
    if dtype not in HALF_DTYPES:
        return [Reduce("result", dtype, kind, "x")]
    wide = Apply("wide", "float32", "cast", ("x",))
    total = Reduce("total", "float32", kind, "wide")
    return [wide, total, Apply("result", dtype, "cast", ("total",))]


def spread_mean(batch: Size, rows: int, columns: int, dtype: str = "float32") -> LoopKernel:
    """The gradient of a mean over the middle one of three dimensions."""
    body = [
        Load("g", dtype, access("g", columns, 0, 1)),
        Constant("share", dtype, 1 / rows),
        Apply("y", dtype, "mul", ("g", "share")),
        Store("y", dtype, row_major("y", batch, rows, columns)),
    ]
    return kernel("spread_mean", [batch, rows, columns], [], {"g": dtype}, {"y": dtype}, body)


def scaled_rows(rows: Size, columns: Size, dtype: str = "float32") -> LoopKernel:
    """Each row of x times its own factor, plus what all rows share."""
    body = [
        Load("x", dtype, row_major("x", rows, columns)),
        Load("by", dtype, access("by", 1, 0)),
        Load("b", dtype, access("b", 0, 1)),
        Apply("scaled", dtype, "mul", ("x", "by")),
        Apply("y", dtype, "add", ("scaled", "b")),
        Store("y", dtype, row_major("y", rows, columns)),
    ]
    inputs = {"x": dtype, "by": dtype, "b": dtype}
    return kernel("scaled_rows", [rows, columns], [], inputs, {"y": dtype}, body)


def row_norm(rows: Size, columns: Size, dtype: str = "float32") -> LoopKernel:
    """Each row divided by its L2 norm."""
    body = [
        Load("x", dtype, row_major("x", rows, columns)),
        Apply("square", dtype, "mul", ("x", "x")),
        Reduce("total", dtype, "sum", "square"),
        Apply("norm", dtype, "sqrt", ("total",)),
        Apply("y", dtype, "div", ("x", "norm")),
        Store("y", dtype, row_major("y", rows, columns)),
    ]
    return kernel("row_norm", [rows], [columns], {"x": dtype}, {"y": dtype}, body)


def softmax_gradient(rows: Size, columns: Size, dtype: str = "float32") -> LoopKernel:
    """dx = y * (g - sum(y * g))."""
    body = [
        Load("y", dtype, row_major("y", rows, columns)),
        Load("g", dtype, row_major("g", rows, columns)),
        Apply("yg", dtype, "mul", ("y", "g")),
        Reduce("dot", dtype, "sum", "yg"),
        Apply("less", dtype, "sub", ("g", "dot")),
        Apply("dx", dtype, "mul", ("y", "less")),
        Store("dx", dtype, row_major("dx", rows, columns)),
    ]
    inputs = {"y": dtype, "g": dtype}
    return kernel("softmax_gradient", [rows], [columns], inputs, {"dx": dtype}, body)


def row_sum(rows: Size, columns: Size, dtype: str = "float32") -> LoopKernel:
    body = [
        Load("x", dtype, row_major("x", rows, columns)),
        *_reduced("sum", dtype),
        Store("result", dtype, access("y", 1, 0)),
    ]
    return kernel("row_sum", [rows], [columns], {"x": dtype}, {"y": dtype}, body)
