"""Kernels of one scalar operator each."""

from __future__ import annotations

from benchmarks.loop_kernels import access, kernel
from fusewright.ir.loop import Apply, Load, LoopKernel, Store
from fusewright.ir.operators import SCALAR_OPS

N = 4099  # elements; no multiple of any vector width


def pointwise(op: str, dtype: str) -> LoopKernel:
    """The operator for N elements, as the entry `op_<op>_<dtype>`."""
    names = ("a", "b", "c")[: SCALAR_OPS[op].arity]
    result = "bool" if SCALAR_OPS[op].result == "bool" else dtype
    body = [
        *(Load(name, dtype, access(name, 1)) for name in names),
        Apply("y", result, op, names),
        Store("y", result, access("y", 1)),
    ]
    return kernel(f"op_{op}_{dtype}", [N], [], dict.fromkeys(names, dtype), {"y": result}, body)
