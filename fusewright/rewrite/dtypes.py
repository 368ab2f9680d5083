"""PyTorch's type promotion, on dtype names."""

from __future__ import annotations

import functools

from fusewright.ir.graph import FLOATS, INTEGERS, Arg, Dim, Ratio, Ref
from fusewright.rewrite.builder import Builder

_FLOAT_RANK = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 3}
_INT_RANK = {"int8": 1, "int16": 2, "int32": 3, "int64": 4}


def category(dtype: str) -> int:
    """0 bool, 1 integer, 2 floating, 3 anything else."""
    if dtype == "bool":
        return 0
    if dtype in INTEGERS:
        return 1
    return 2 if dtype in FLOATS else 3


def promote(left: str, right: str) -> str:
    """torch.promote_types for the dtypes that loops support."""
    if left == right:
        return left
    a, b = sorted((left, right), key=category)
    if category(a) != category(b):
        return b
    if category(a) == 2:
        if _FLOAT_RANK[a] == _FLOAT_RANK[b]:
            return "float32"
        return max(a, b, key=_FLOAT_RANK.__getitem__)
    if "uint8" in (a, b):
        other = b if a == "uint8" else a
        return "int16" if other == "int8" else other
    return max(a, b, key=_INT_RANK.__getitem__)


def scalar_dtype(value: Arg, default_float: str = "float32") -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | Dim):
        return "int64"
    return default_float if isinstance(value, float | Ratio) else "unknown"


def result_type(builder: Builder, args: tuple[Arg, ...]) -> str:
    """torch.result_type: tensors with dimensions outrank those without, which outrank numbers."""
    ranked: list[list[str]] = [[], [], []]
    for arg in args:
        if isinstance(arg, Ref):
            spec = builder.spec(arg.name)
            ranked[0 if spec.shape else 1].append(spec.dtype)
        else:
            ranked[2].append(scalar_dtype(arg))
    result: str | None = None
    for group in ranked:
        within = functools.reduce(promote, group) if group else None
        if within is None:
            continue
        if result is None or category(within) > category(result):
            result = within if result is None else promote(result, within)
    return result or "float32"
