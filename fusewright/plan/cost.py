"""Bytes and operations of PyTorch calls, at the example's sizes; kernels count their own."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fusewright.ir.graph import Node, Ref, TensorSpec


def call_operations(node: Node, specs: Mapping[str, TensorSpec], sizes: Mapping[str, int]) -> int:
    """Operations of matmuls, convolutions and recurrent layers; a multiply-add counts as two."""
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
    """Each weight matrix times the vector of each step, and twice that for the gradients."""
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
