"""The composite ATen operators that capture decomposes, with PyTorch's own decompositions.

The list holds operators that become pointwise operators, reductions and views. Operators that would
become gathers or scatters stay whole, as calls that are visible in the plan. PyTorch decomposes
some of those by itself while it traces; `kept_whole` prevents it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import get_decompositions
from torch._decomp.decompositions import upsample_compute_output_size as _size_of
from torch._prims_common import suggest_memory_format

from fusewright.capture.gradients import (
    affine_grid_gradient,
    cumprod_gradient,
    gradient_decompositions,
)
from fusewright.capture.pads import circular, pad_decompositions

_NORMALISATIONS = """
    _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional
    batch_norm_backward native_batch_norm native_batch_norm_backward cudnn_batch_norm
    cudnn_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training native_layer_norm native_layer_norm_backward
    native_group_norm native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax
    renorm linalg_vector_norm norm dist _weight_norm_interface
"""
_ACTIVATIONS = """
    gelu gelu_backward silu silu_backward mish mish_backward elu elu_backward celu selu
    hardtanh hardtanh_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward
    hardshrink softshrink softplus softplus_backward threshold threshold_backward leaky_relu
    leaky_relu_backward relu6 glu glu_backward prelu _prelu_kernel _prelu_kernel_backward
    rrelu_with_noise_backward sigmoid_backward tanh_backward logit logit_backward
    log_sigmoid_forward log_sigmoid_backward native_dropout_backward
"""
_LOSSES = """
    mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss
    huber_loss_backward soft_margin_loss soft_margin_loss_backward binary_cross_entropy
    binary_cross_entropy_backward binary_cross_entropy_with_logits margin_ranking_loss
    hinge_embedding_loss
"""
_POINTWISE = """
    addcdiv addcmul lerp xlogy logaddexp logaddexp2 nan_to_num masked_fill rsub heaviside sinc
    deg2rad rad2deg count_nonzero nansum aminmax isneginf isposinf sgn special_entr
    special_log_ndtr special_ndtr special_xlog1py zeros zeros_like ones ones_like new_zeros
    new_ones new_full full_like fill zero tril triu addr
"""
_VIEWS = """
    unbind unsafe_split unsafe_split_with_sizes pixel_shuffle pixel_unshuffle channel_shuffle repeat
    narrow_copy affine_grid_generator
"""


# Decomposed, these are gathers, and their gradients are scatter-adds, which take ten times as long.
_NEAREST = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d
""".split()
_LINEAR = """
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d _upsample_bilinear2d_aa
""".split()
_CUBIC = "upsample_bicubic2d _upsample_bicubic2d_aa _upsample_lanczos2d_aa".split()


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """Operators that PyTorch's tracing would decompose in Python stay whole.

    Their C++ shape functions need numbers, but the first dimension is a symbol.
    """
    replaced: dict[Any, dict[Any, Any]] = {}
    for name in (*_NEAREST, *_LINEAR, *_CUBIC):
        if not hasattr(torch.ops.aten, name):
            continue
        packet, backward = (getattr(torch.ops.aten, each) for each in (name, f"{name}_backward"))
        nearest = name in _NEAREST
        shapes = packet.default.py_kernels.get(DispatchKey.Meta) if nearest else _enlarged_shape
        gradients = _gradient_shape_in_layout if name in _LINEAR else _gradient_shape
        replaced[packet.default] = {} if shapes is None else {DispatchKey.Meta: shapes}
        replaced[packet.vec] = {DispatchKey.CompositeImplicitAutograd: _by_size(packet)}
        if not (nearest and name.endswith("2d")):  # PyTorch's handles symbols and channels-last
            replaced[backward.default] = {DispatchKey.Meta: gradients}
    replaced[torch.ops.aten._pad_circular.default] = {
        DispatchKey.CompositeImplicitAutograd: circular
    }
    replaced[torch.ops.aten.affine_grid_generator_backward.default] = {
        DispatchKey.CompositeImplicitAutograd: affine_grid_gradient
    }
    replaced[torch.ops.aten.cumprod_backward.default] = {
        DispatchKey.CompositeImplicitAutograd: cumprod_gradient
    }
    # PyTorch's decomposition counts labels behind the first -1, though that ends their list.
    margins = torch.ops.aten.multilabel_margin_loss_forward.default
    held = margins.py_kernels.items()
    replaced[margins] = {key: each for key, each in held if key != DispatchKey.Autograd}
    margins = torch.ops.aten.multilabel_margin_loss_backward.default
    replaced[margins] = {DispatchKey.Meta: _gradient_like}
    before = {op: dict(op.py_kernels) for op in replaced}
    try:
        _set_kernels(replaced)
        yield
    finally:
        _set_kernels(before)


def _set_kernels(kernels: Mapping[Any, dict[Any, Any]]) -> None:
    for op, each in kernels.items():
        op.py_kernels.clear()
        op.py_kernels.update(each)
        op._dispatch_cache.clear()


def _by_size(packet: Any) -> Callable[..., Any]:
    """The overload `vec`, which takes a size or factors, by way of the one that takes both."""

    def enlarged(image: Any, output_size: Any, *others: Any) -> Any:
        *corners, factors = others  # whether corners are aligned, if the operator has that
        shape = image.size()
        size: Any = _size_of(shape, output_size, factors)  # type: ignore[no-untyped-call]
        return packet.default(image, size, *corners, *(factors or [None] * len(size)))

    return enlarged


def _enlarged_shape(image: Any, output_size: Any, *_: Any) -> Any:
    shape = (*image.shape[:2], *output_size)
    return image.new_empty(shape).to(memory_format=suggest_memory_format(image))


def _gradient_shape(grad_output: Any, output_size: Any, input_size: Any, *_: Any) -> Any:
    return grad_output.new_empty(input_size)


def _gradient_like(grad_output: Any, scores: Any, *_: Any) -> Any:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _gradient_shape_in_layout(grad_output: Any, *others: Any) -> Any:
    """Channels-last if the incoming gradient is."""
    shape = _gradient_shape(grad_output, *others)
    return shape.to(memory_format=suggest_memory_format(grad_output))


@cache
def decomposition_table() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The table that AOTAutograd applies while it traces."""
    names = (_NORMALISATIONS + _ACTIVATIONS + _LOSSES + _POINTWISE + _VIEWS).split()
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    aten = torch.ops.aten
    table: dict[Any, Callable[..., Any]] = {**get_decompositions(packets), **pad_decompositions()}
    table |= {aten.eye.default: _eye, aten.eye.m: _eye, aten.native_group_norm.default: _group_norm}
    table |= gradient_decompositions()
    table[aten._assert_async.default] = _assert_with_message
    loss = aten.binary_cross_entropy.default
    table[loss] = _with_probabilities_checked(table[loss])
    return table


def _assert_with_message(value: Any) -> None:
    """PyTorch drops an assertion without a message from its graphs."""
    text = "Expected Tensor with single nonzero value, but got zero"
    torch.ops.aten._assert_async.msg(value, text)


def _with_probabilities_checked(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss after the checks of PyTorch's operator, which raises an error on a CPU. On a GPU,
    where an assertion ends the process, the numbers are taken as they are."""

    def checked(scores: Any, target: Any, *others: Any, **named: Any) -> Any:
        for name, each in (("input", scores), ("target", target)):
            if each.device.type == "cpu":
                text = f"all elements of {name} should be between 0 and 1"
                beyond = torch.where((each >= 0) & (each <= 1), 0.0, 1.0).sum()
                torch.ops.aten._assert_async.msg(beyond == 0, text)
        return loss(scores, target, *others, **named)

    return checked


def _group_norm(
    x: Any, weight: Any, bias: Any, batch: Any, channels: int, inner: Any, groups: int, eps: float
) -> tuple[Any, Any, Any]:
    """(x - mean) · rstd · weight + bias on every device. For the CPU, PyTorch's own folds mean and
    weight into one factor and one term per channel, which takes two more kernels."""
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    grouped = x.to(wide).reshape(batch, groups, channels // groups, inner)
    var, mean = torch.var_mean(grouped, dim=(2, 3), correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    y = ((grouped - mean) * rstd).view(x.shape)
    per_channel = [channels] + [1] * (x.dim() - 2)
    y = y if weight is None else y * weight.view(per_channel)
    y = y if bias is None else y + bias.view(per_channel)
    rows = (each.to(x.dtype).squeeze((2, 3)) for each in (mean, rstd))
    return (y.to(x.dtype), *rows)


def _eye(n: Any, m: Any = None, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """One where both indices are equal. PyTorch's own counts in uint16, which loops lack."""
    rows = torch.arange(n, device=device).unsqueeze(-1)
    columns = torch.arange(n if m is None else m, device=device)
    return (rows == columns).to(dtype or torch.get_default_dtype())
