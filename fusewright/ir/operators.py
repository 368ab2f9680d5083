"""The scalar operators and reductions that a fused kernel may use.

A name here is the name in `loop.Apply` or `loop.Reduce`, and of the C++ function in `kernels/`
(namespace fw). Semantics are PyTorch's, corner cases included; tests/ir/test_operators.py checks
each operator. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ScalarOp:
    """`result` is 'same' (as the operands), bool or int64; `cost` counts approximate operations.

    `header` is the file of `kernels/` that defines the function. With `near`, the host has two
    functions on floats: `NAME(Near{}, …)` is free of branches and for usual arguments, which
    `NAME_far` tests, and `NAME` is for all. For the dtypes in `run`, the host's `NAME_run` takes a
    run of lanes at once and returns the same bits as `NAME`.
    """

    name: str
    arity: int
    result: str = "same"
    cost: int = 1
    header: str = "scalar/operators.hpp"
    near: bool = False
    run: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reduction:
    """`state_words` counts the 8-byte words of one partial result, as an upper bound.

    `template` is the C++ accumulator, and `header` the file of `kernels/` that defines it, if not
    accumulators.hpp; `results` are its methods, one per result. `cost` counts approximate
    operations per element. `meets`: GPU threads that combine their partial results exchange a value
    first.
    """

    name: str
    template: str
    results: tuple[str, ...] = ("result",)
    state_words: int = 1
    cost: int = 1
    header: str = ""
    meets: bool = False


def _ops(names: str, arity: int, result: str = "same", cost: int = 1) -> tuple[ScalarOp, ...]:
    return tuple(ScalarOp(name, arity, result, cost) for name in names.split())


def _libm(names: str, arity: int, cost: int, header: str) -> tuple[ScalarOp, ...]:
    return tuple(ScalarOp(name, arity, "same", cost, header) for name in names.split())


def _near(ops: tuple[ScalarOp, ...]) -> tuple[ScalarOp, ...]:
    return tuple(replace(op, near=True) for op in ops)


def _run(ops: tuple[ScalarOp, ...], *dtypes: str) -> tuple[ScalarOp, ...]:
    return tuple(replace(op, run=dtypes) for op in ops)


_TRANSCENDENTAL = "scalar/transcendental.hpp"
_LOGARITHM = "scalar/logarithm.hpp"
_TRIGONOMETRIC = "scalar/inverse_trigonometric.hpp"
_HYPERBOLIC = "scalar/hyperbolic.hpp"
_SPECIAL = "scalar/special.hpp"
_FP16_SPLIT = "scalar/fp16_scale.hpp"
_SELECTION = "scalar/selection.hpp"
_TF32 = "scalar/tf32.hpp"

_ALL_OPS: tuple[ScalarOp, ...] = (
    *_ops("neg abs sign relu ceil floor round trunc frac bitwise_not", 1),
    *_ops("isnan isinf signbit logical_not", 1, result="bool"),
    *_ops("add sub mul maximum minimum fmax fmin copysign", 2),
    *_ops("bitwise_and bitwise_or bitwise_xor shift_left shift_right", 2),
    *_ops("eq ne lt le gt ge logical_and logical_or logical_xor", 2, result="bool"),
    *_ops("div", 2, cost=4),
    *_near(_ops("floor_divide remainder fmod", 2, cost=20)),
    *_ops("trunc_divide", 2, cost=20),
    *_libm("pow", 2, 20, "scalar/power.hpp"),
    *_ops("where", 3),
    *_ops("cast", 1),
    *_libm("sqrt rsqrt reciprocal", 1, 4, _TRANSCENDENTAL),
    *_run(_libm("exp", 1, 12, _TRANSCENDENTAL), "float32", "float64"),
    *_libm("exp2 expm1 sigmoid", 1, 12, _TRANSCENDENTAL),
    *_run(_libm("log", 1, 12, _LOGARITHM), "float32", "float64"),
    *_run(_libm("log2 log10", 1, 12, _LOGARITHM), "float32"),
    *_libm("log1p", 1, 12, _LOGARITHM),
    *_run(_libm("tanh", 1, 12, "scalar/tanh.hpp"), "float32"),
    *_run(_libm("erf", 1, 20, "scalar/erf.hpp"), "float32", "float64"),
    *_run(_libm("sin cos tan", 1, 20, "scalar/trigonometric.hpp"), "float32", "float64"),
    *_libm("asin acos atan", 1, 20, _TRIGONOMETRIC),
    *_libm("atan2 hypot", 2, 20, _TRIGONOMETRIC),
    *_libm("sinh cosh asinh acosh atanh lgamma", 1, 20, _HYPERBOLIC),
    *_run(_libm("erfc", 1, 20, "scalar/erfc.hpp"), "float32", "float64"),
    *_run(_libm("erfinv", 1, 40, "scalar/erfinv.hpp"), "float32", "float64"),
    *_libm("digamma", 1, 40, _SPECIAL),
    *_libm("finite_magnitude fp16_scale", 1, 2, _FP16_SPLIT),
    *_libm("round_tf32", 1, 3, _TF32),
    ScalarOp("ordered", 1, "int64", 4, _SELECTION),
    ScalarOp("class_index", 3, "same", 2, _SELECTION),
)

SCALAR_OPS: Mapping[str, ScalarOp] = {op.name: op for op in _ALL_OPS}

REDUCTIONS: Mapping[str, Reduction] = {
    reduction.name: reduction
    for reduction in (
        Reduction("sum", "Sum"),
        Reduction("prod", "Prod"),
        Reduction("max", "Max"),
        Reduction("min", "Min"),
        Reduction("any", "Any"),
        Reduction("all", "All"),
        Reduction("welford", "Welford", ("mean", "m2"), state_words=4, cost=4),
        Reduction(
            "logsumexp",
            "LogSumExp",
            state_words=2,
            cost=16,
            header="scalar/logsumexp.hpp",
            meets=True,
        ),
    )
}

# Scans by their operation, each with its C++ rule and PyTorch's name for it.
SCANS: Mapping[str, tuple[str, str]] = {
    "sum": ("RunningSum", "cumsum"),
    "prod": ("RunningProd", "cumprod"),
}

# Memory type and register type of each dtype: 16-bit floats are computed in float.
STORAGE_TYPES: Mapping[str, str] = {
    "float16": "fw::half",
    "bfloat16": "fw::bf16",
    "float32": "float",
    "float64": "double",
    "uint8": "uint8_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "bool": "fw::bool8",
}
REGISTER_TYPES: Mapping[str, str] = {
    **STORAGE_TYPES,
    "float16": "float",
    "bfloat16": "float",
    "bool": "bool",
}
