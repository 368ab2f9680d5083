"""From a `matmul` node to the description of its kernel."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.ir.graph import ONE, ZERO, Node, product
from fusewright.ir.loop import LoopKernel
from fusewright.ir.matmul import MatmulKernel, RawOperand, SplitOperand
from fusewright.plan.values import Values
from fusewright.rewrite.matmuls import contracted_dims, operands_of


def matmul_kernel(values: Values, node: Node, epilogue: LoopKernel, given: str) -> MatmulKernel:
    a, *b = operands_of(node)
    a_dim, b_dim = contracted_dims(node)
    *batches, rows, columns = values.spec(node.name).shape
    return MatmulKernel(
        name="",
        summary="",
        rows=rows,
        columns=columns,
        contracted=values.spec(a).shape[a_dim],
        batches=product(batches),
        a=_raw(values, a, a_dim),
        b=_split(values, b, b_dim) if len(b) > 1 else _raw(values, b[0], b_dim),
        epilogue=epilogue,
        accumulator=given,
    )


def _raw(values: Values, name: str, contracted: int) -> RawOperand:
    spec = values.spec(name)
    *batch, row, column = spec.strides
    free, deep = (row, column) if contracted == -1 else (column, row)
    # Without a batch, its stride may be anything, even one that TMA refuses.
    several = bool(batch) and spec.shape[0] != ONE
    return RawOperand(name, spec.dtype, free, deep, batch[0] if several else ZERO)


def _split(values: Values, parts: Sequence[str], contracted: int) -> SplitOperand:
    hi, lo, inverse = parts
    return SplitOperand(hi, lo, inverse, values.spec(hi).strides[-2], contracted == -2)
