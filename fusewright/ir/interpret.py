"""The reference: runs any stage's graph with plain PyTorch, in float64 where the graph has floats.

All stages from capture to plan share one graph language, so one interpreter can check that a stage
kept the meaning of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusewright.ir.graph import FLOATS, Arg, Dim, Graph, Node, Ratio, Ref, Symbolic, TensorSpec
from fusewright.runtime.recurrent import _fw_recurrent, _fw_recurrent_backward


def fp16_scale(x: torch.Tensor) -> torch.Tensor:
    """The power of two s with |x|·s in [2^14, 2^15), s and 1/s normal; 1 for Inf and NaN."""
    most = {torch.float32: 126, torch.float64: 1022}[x.dtype]
    exponent = (15 - torch.frexp(x).exponent).clamp(-most, most)
    exponent = torch.where(x == 0, most, torch.where(x.isfinite(), exponent, 0))
    return torch.ldexp(torch.ones_like(x), exponent)


def round_tf32(x: torch.Tensor) -> torch.Tensor:
    """The nearest number of TF32, ties away from zero, as in kernels/scalar/tf32.hpp."""
    whole, lost = (torch.int32, 13) if x.dtype == torch.float32 else (torch.int64, 42)
    raw, info = x.view(whole), torch.finfo(x.dtype)
    near = ((raw + (1 << (lost - 1))) & -(1 << lost)).view(x.dtype)
    return torch.where((x.abs() >= info.tiny) & near.isfinite() & x.isfinite(), near, x)


def ordered(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit integer for each float, in the same order; NaN comes last."""
    raw = torch.where(x == 0, 0.0, x).to(torch.float32).view(torch.int32)
    return torch.where(x.isnan(), 2**31 - 1, raw ^ ((raw >> 31) & (2**31 - 1))).to(torch.int64)


_RENAMED: Mapping[str, Callable[..., torch.Tensor]] = {
    "floor_divide": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    "where": torch.where,
    "finite_magnitude": lambda x: torch.where(x.isfinite(), x.abs(), 0.0),
    "fp16_scale": fp16_scale,
    "round_tf32": round_tf32,
    "ordered": ordered,
    "class_index": lambda target, classes, ignored: target,
}


def dtype_of(name: str, *, exact: bool) -> torch.dtype:
    """The torch dtype of a name; floats become float64 unless `exact`."""
    if name in FLOATS and not exact:
        return torch.float64
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def interpret(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    sizes: Mapping[str, int] | None = None,
    *,
    exact: bool = False,
) -> list[Any]:
    """Run `graph`. `sizes` gives the symbols; `exact` keeps the graph's own float dtypes."""
    run = _Run(dict(sizes or {}), exact)
    values: dict[str, Any] = {}
    for each, tensor in zip(graph.inputs, inputs, strict=True):
        floating = tensor.is_floating_point() and not exact
        values[each.name] = tensor.to(torch.float64) if floating else tensor
    for node in graph.nodes:
        values[node.name] = run.node(node, values)
    return [_output(each, values, run.sizes) for each in graph.outputs]


def _output(output: str | Dim | None, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    if isinstance(output, Dim):
        return output.at(sizes)
    return values[output] if output is not None else None


class _Run:
    def __init__(self, sizes: dict[str, int], exact: bool) -> None:
        self.sizes = sizes
        self.exact = exact

    def node(self, node: Node, values: Mapping[str, Any]) -> Any:
        args = [self.arg(arg, values) for arg in node.args]
        kwargs = {key: self.arg(value, values) for key, value in node.kwargs}
        if node.op == "getitem":
            return args[0][args[1]]
        if node.layer:
            return _layer(node, args)
        if node.is_aten:
            return self.aten(node, args, kwargs)
        assert node.spec is not None or node.op == "reduce_welford"
        if node.op.startswith("reduce_"):
            return _reduce(node.op.removeprefix("reduce_"), args[0], args[1])
        if node.op == "matmul":
            return _matmul(*args)
        assert node.spec is not None
        if node.op.startswith("scan_"):
            return _scan(node.op.removeprefix("scan_"), *args)
        if node.op in ("fused_convolution", "weight_gradient"):
            of = _convolution if node.op == "fused_convolution" else _weight_gradient
            return of([size.at(self.sizes) for size in node.spec.shape], *args)
        return self.canonical(node, node.spec, args)

    def canonical(self, node: Node, spec: TensorSpec, args: list[Any]) -> torch.Tensor:
        dtype = dtype_of(spec.dtype, exact=self.exact)
        shape = [size.at(self.sizes) for size in spec.shape]
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        match node.op:
            case "full":
                return torch.full(shape, args[0], dtype=dtype, device=device)
            case "literal":
                return torch.tensor(node.args[0], dtype=dtype).reshape(shape)
            case "conv_tf32":  # the interpreter rounds nothing
                return torch.tensor(False, device=device)
            case "iota":
                steps = torch.arange(math.prod(shape), dtype=torch.int64)
                counted: torch.Tensor = steps * args[1] + args[0]
                return counted.to(dtype)
            case "pad":
                numbers = [each for pair in reversed(args[1]) for each in pair]
                return torch.constant_pad_nd(args[0], numbers, args[2])
            case "cast":
                cast: torch.Tensor = args[0].to(dtype)
                return cast
        tensors = [_tensor(arg, args, self.exact) for arg in args]
        function = _RENAMED.get(node.op) or getattr(torch, node.op)
        result: torch.Tensor = function(*tensors)
        return result.to(dtype)

    def aten(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        namespace, packet, overload = node.op.split(".")
        target = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        if node.op == "aten.view.default":
            return args[0].reshape(args[1])
        return target(*args, **kwargs)

    def arg(self, arg: Arg, values: Mapping[str, Any]) -> Any:
        if isinstance(arg, Ref):
            return values[arg.name]
        if isinstance(arg, Dim | Ratio):
            return arg.at(self.sizes)
        if isinstance(arg, tuple):
            return [self.arg(item, values) for item in arg]
        if isinstance(arg, Symbolic):
            if arg.kind == "dtype":
                return dtype_of(arg.name, exact=self.exact)
            return torch.device(arg.name) if arg.kind == "device" else getattr(torch, arg.name)
        return arg


def _layer(node: Node, args: list[Any]) -> Any:
    """A recurrent layer, or all of its gradients."""
    if not node.is_masked:
        return _fw_recurrent(True, node.layer, *args)
    changes, tape, data, sizes, state, weights, *rest = args
    want = [True] * (1 + len(state) + len(weights))
    call = (node.layer, data, sizes, state, weights, *rest)
    return _fw_recurrent_backward(want, changes, tape, *call)


def _tensor(arg: Any, args: Sequence[Any], exact: bool) -> torch.Tensor:
    """A number among tensors takes their dtype, as it does in a kernel."""
    if isinstance(arg, torch.Tensor):
        return arg
    like = [
        other for other in args if isinstance(other, torch.Tensor) and other.dtype != torch.bool
    ]
    if like:
        return torch.tensor(arg, dtype=like[0].dtype, device=like[0].device)
    floating = torch.float32 if exact else torch.float64
    return torch.tensor(arg, dtype=floating if isinstance(arg, float) else None)


def _matmul(a: torch.Tensor, *rest: Any) -> torch.Tensor:
    """result[q][p] = Σ_r b[q, r] · a[p, r], in float64 for all operand dtypes."""
    *parts, a_dim, b_dim = rest
    b = parts[0].double()
    if len(parts) == 3:
        _, lo, inverse = parts
        b = (b + lo.double()) * inverse.double()[..., None]
    right = a.double() if a_dim == -2 else a.double().mT
    result: torch.Tensor = (b if b_dim == -1 else b.mT) @ right
    return result.to(a.dtype)


def _convolution(
    shape: list[int],
    source: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    transposed: bool,
) -> torch.Tensor:
    """A convolution in float64. If a transposed one has more than its natural size, the rest is
    output padding; the gradient of such a convolution may be smaller than its natural size."""
    wide = (source.double(), weight.double(), None, stride, padding, dilation, transposed)
    zeros = [0] * (len(shape) - 2)
    found = torch.ops.aten.convolution(*wide, zeros, groups)
    if transposed:
        more = [wanted - size for wanted, size in zip(shape[2:], found.shape[2:], strict=True)]
        found = torch.ops.aten.convolution(*wide, more, groups)
    result: torch.Tensor = found[tuple(map(slice, shape))].to(source.dtype)
    return result


def _weight_gradient(
    shape: list[int],
    source: torch.Tensor,
    grad_output: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """The weight gradient of a convolution, in float64. For a transposed one with output padding,
    `grad_output` may be smaller than its natural size."""
    weight = torch.zeros(shape, dtype=torch.float64)
    zeros = [0] * len(stride)
    like = torch.ops.aten.convolution(
        source.double(), weight, None, stride, padding, dilation, False, zeros, groups
    )
    like[tuple(map(slice, grad_output.shape))] = grad_output.double()
    found = torch.ops.aten.convolution_backward(
        like, source.double(), weight, None, stride, padding, dilation, False, zeros,
        groups, [False, True, False],
    )  # fmt: skip
    result: torch.Tensor = found[1].to(source.dtype)
    return result


def _scan(kind: str, value: torch.Tensor, along: int, backward: bool) -> torch.Tensor:
    along_all = {"sum": torch.cumsum, "prod": torch.cumprod}[kind]
    value = value.flip(along) if backward else value
    result: torch.Tensor = along_all(value, along, dtype=value.dtype)
    return result.flip(along) if backward else result


def _reduce(kind: str, value: torch.Tensor, dims: list[int]) -> Any:
    if not dims:
        return (value, torch.zeros_like(value)) if kind == "welford" else value
    match kind:
        case "sum":
            return value.sum(dims, dtype=value.dtype)
        case "max":
            return value.amax(dims)
        case "min":
            return value.amin(dims)
        case "logsumexp":
            return value.logsumexp(dims)
        case "any":
            return value.any(dims)
        case "all":
            return value.all(dims)
        case "prod":
            for position in sorted(dims, reverse=True):
                value = value.prod(position, dtype=value.dtype)
            return value
        case "welford":
            mean = value.mean(dims, keepdim=True)
            m2 = (value - mean).square().sum(dims)
            return mean.reshape(m2.shape), m2
    raise AssertionError(kind)
