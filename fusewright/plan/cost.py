"""Bytes and operations of each step, counted at the example's sizes: the roofline's two numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fusewright.ir.convolution import WindowKernel
from fusewright.ir.graph import ITEM_BYTES, ZERO, Node, Ref, TensorSpec
from fusewright.ir.loop import Access, Apply, Load, LoopKernel, Reduce, Scan, Store, level
from fusewright.ir.matmul import ProductKernel, SplitOperand
from fusewright.ir.operators import REDUCTIONS, SCALAR_OPS


def _points(kernel: LoopKernel, where: Access, sizes: Mapping[str, int]) -> int:
    return math.prod(
        axis.size.at(sizes)
        for axis, stride in zip(kernel.axes, where.strides, strict=True)
        if stride.factor
    )


def loop_bytes(
    kernel: LoopKernel, sizes: Mapping[str, int], held: Mapping[str, int] | None = None
) -> int:
    """Each distinct element read once, each stored element written once.

    `held` are the bytes of whole tensors: several accesses, such as a window's taps, read at most
    those. Without it they are taken to read the same.
    """
    reads: dict[str, dict[Access, int]] = {}
    writes = 0
    for item in kernel.body:
        if isinstance(item, Load):
            size = _points(kernel, item.access, sizes) * ITEM_BYTES[item.dtype]
            reads.setdefault(item.access.buffer, {})[item.access] = size
        elif isinstance(item, Store):
            writes += _points(kernel, item.access, sizes) * ITEM_BYTES[item.dtype]
    whole = {name: max(found.values()) for name, found in reads.items()} | dict(held or {})
    return writes + sum(min(whole[name], sum(found.values())) for name, found in reads.items())


def loop_operations(kernel: LoopKernel, sizes: Mapping[str, int]) -> int:
    """Scalar operations; a value per row counts once per row."""
    leveled = level(kernel)
    rows, cells = kernel.outer_numel.at(sizes), kernel.inner_numel.at(sizes)
    total = 0
    for item in kernel.body:
        if isinstance(item, Apply):
            cost = SCALAR_OPS[item.op].cost if item.op in SCALAR_OPS else 0
            total += int(cost) * rows * (cells if leveled.is_element[item.name] else 1)
        elif isinstance(item, Reduce):
            total += rows * cells * REDUCTIONS[item.kind].cost
        elif isinstance(item, Scan):
            total += rows * cells
    return total


def ended_bytes(
    kernel: ProductKernel | WindowKernel, sizes: Mapping[str, int], held: Mapping[str, int]
) -> int:
    """Each operand once, and what the epilogue reads and writes beside the product; `held` is as in
    `loop_bytes`."""
    beside = loop_bytes(kernel.epilogue, sizes) - _given_bytes(kernel, sizes)
    if isinstance(kernel, ProductKernel):
        return _product_operands(kernel, sizes) + beside
    of = kernel.geometry
    source = 4 * of.source_elements(sizes)
    if kernel.prologue is not None:
        source = loop_bytes(kernel.prologue, sizes, held) - source
    return source + 4 * of.filter_elements + beside


def _given_bytes(kernel: ProductKernel | WindowKernel, sizes: Mapping[str, int]) -> int:
    numbers = math.prod(axis.size.at(sizes) for axis in kernel.epilogue.axes)
    return ITEM_BYTES[kernel.given.dtype] * numbers


def _product_operands(kernel: ProductKernel, sizes: Mapping[str, int]) -> int:
    rows, columns, contracted, batches = kernel.extents(sizes)
    a, b = (batches * size * contracted for size in (columns, rows))
    a = a if kernel.a.batch_stride != ZERO else columns * contracted
    item = ITEM_BYTES[kernel.a.dtype]  # and so have hi and lo together
    scales = 0
    if isinstance(kernel.b, SplitOperand):
        scales = 4 * batches * (contracted if kernel.b.contracted_rows else rows)
    return item * (a + b) + scales


def ended_operations(kernel: ProductKernel | WindowKernel, sizes: Mapping[str, int]) -> int:
    """Multiply-adds as two operations each, and the epilogue's."""
    if isinstance(kernel, ProductKernel):
        own = 2 * math.prod(kernel.extents(sizes))
    else:
        own = kernel.geometry.operations(sizes)
        if kernel.prologue is not None:
            own += loop_operations(kernel.prologue, sizes)
    return own + loop_operations(kernel.epilogue, sizes)


def call_operations(node: Node, specs: Mapping[str, TensorSpec], sizes: Mapping[str, int]) -> int:
    """Multiply-adds, as two operations each, of products, convolutions and recurrent layers; others
    count none."""
    if node.layer:
        return _layer_operations(node, specs, sizes)
    given = [specs[arg.name] for arg in node.args if isinstance(arg, Ref) and arg.name in specs]
    name = node.op.split(".")[1] if node.is_aten else ""
    if name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"):
        left = given[-2]
        width = given[-1].shape[-1].at(sizes) if len(given[-1].shape) > 1 else 1
        return 2 * left.numel.at(sizes) * width
    if name in ("convolution", "convolution_backward"):
        weight = given[1] if name == "convolution" else given[2]
        grown = node.spec if name == "convolution" else given[0]
        if grown is None:
            return 0
        transposed = node.args[6] if name == "convolution" else node.args[7]
        pixels = (given[0] if transposed and name == "convolution" else grown).numel.at(sizes)
        per_pixel = math.prod(size.at(sizes) for size in weight.shape[1:])
        mask = node.args[-1]
        wanted = sum(map(bool, mask[:2])) if isinstance(mask, tuple) and len(mask) == 3 else 1
        return 2 * pixels * per_pixel * (wanted if name == "convolution_backward" else 1)
    return 0


def _layer_operations(node: Node, specs: Mapping[str, TensorSpec], sizes: Mapping[str, int]) -> int:
    """Each matrix of weights times each step's vector, and twice that for the gradients."""
    data, _, _, weights = node.args[2:6] if node.is_masked else node.args[:4]
    assert isinstance(data, Ref) and isinstance(weights, tuple)
    held = [specs[each.name] for each in weights if isinstance(each, Ref)]
    numbers = sum(each.numel.at(sizes) for each in held if len(each.shape) == 2)
    steps = math.prod(size.at(sizes) for size in specs[data.name].shape[:-1])
    return 2 * numbers * steps * (2 if node.is_masked else 1)


def call_bytes(
    node: Node,
    outputs: tuple[str, ...],
    specs: Mapping[str, TensorSpec],
    sizes: Mapping[str, int],
) -> int:
    names = {*node.refs(), *(name for name in outputs if name)}
    return sum(specs[name].bytes_at(sizes) for name in names if name in specs)
