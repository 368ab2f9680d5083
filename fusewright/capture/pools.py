"""Max pooling with a gradient, in the joint graph, as a pair of operators that pass each maximum's
position as a byte. PyTorch's operators pass a 64-bit index.

This runs before the graph is partitioned, so the bytes are what is saved for backward. The
operators exist only in graphs: each is lowered to loops, and `ir.pool_offsets.pitches` and the
checks here say whether that is possible. If another operator reads the indices, PyTorch's operators
stay.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusewright.ir.pool_offsets import NOWHERE, Along, Window, pitches

_AXES = {
    torch.ops.aten.max_pool2d_with_indices.default: 2,
    torch.ops.aten.max_pool3d_with_indices.default: 3,
}
_BACKWARD = {
    2: torch.ops.aten.max_pool2d_with_indices_backward.default,
    3: torch.ops.aten.max_pool3d_with_indices_backward.default,
}
_FORWARD = {axes: op for op, axes in _AXES.items()}
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGEST_SIZE = 2**29
_ZEROS = (torch.ops.aten.scalar_tensor.default, torch.ops.aten.full.default)

# Kernel size, stride, padding, dilation, ceil mode and pitches.
_WINDOW = "int[] k, int[] s, int[] p, int[] d, bool c, int[] pitches"
torch.library.define(
    "fusewright::max_pool_offsets", f"(Tensor x, {_WINDOW}, bool positive) -> (Tensor, Tensor)"
)
torch.library.define(
    "fusewright::max_pool_offsets_backward",
    f"(Tensor grad_output, Tensor pool_offsets, int[] sizes, {_WINDOW}) -> Tensor",
)


@torch.library.impl("fusewright::max_pool_offsets", "default")
def _max_pool(
    x: Tensor, k: Any, s: Any, p: Any, d: Any, c: bool, pitches: Sequence[int], positive: bool
) -> tuple[Tensor, Tensor]:
    """The maxima and their offsets; with `positive`, a maximum of at most zero has NOWHERE."""
    values, rest = _FORWARD[len(k)](x, k, s, p, d, c)
    pool_offsets = torch.zeros_like(rest)
    for axis in reversed(range(-len(k), 0)):
        first = _first(rest, axis, s[axis], p[axis])
        pool_offsets = pool_offsets + (rest % x.shape[axis] - first) * pitches[axis]
        rest = rest // x.shape[axis]
    pool_offsets = pool_offsets.masked_fill(values <= 0, NOWHERE) if positive else pool_offsets
    return values, pool_offsets.to(torch.uint8)


@torch.library.impl("fusewright::max_pool_offsets_backward", "default")
def _max_pool_backward(
    grad_output: Tensor,
    pool_offsets: Tensor,
    sizes: Sequence[int],
    k: Any,
    s: Any,
    p: Any,
    d: Any,
    c: bool,
    pitches: Sequence[int],
) -> Tensor:
    grad_output = grad_output.masked_fill(pool_offsets == NOWHERE, 0)
    rest = pool_offsets.to(torch.int64)
    indices = torch.zeros_like(rest)
    for axis in range(-len(k), 0):
        inside = rest // pitches[axis] + _first(rest, axis, s[axis], p[axis])
        indices = indices * sizes[axis] + inside.clamp(0, sizes[axis] - 1)
        rest = rest % pitches[axis]
    like = grad_output.new_zeros((*grad_output.shape[: -len(k)], *sizes))
    found: Tensor = _BACKWARD[len(k)](grad_output, like, k, s, p, d, c, indices)
    return found


def _first(like: Tensor, axis: int, stride: int, padding: int) -> Tensor:
    """The position at which each window begins along an axis."""
    starts = torch.arange(like.shape[axis], device=like.device) * stride - padding
    return starts.reshape(-1, *(1 for _ in range(-1 - axis)))


def with_pool_offsets(joint: fx.GraphModule) -> None:
    """Replace the pairs wherever loops can compute them."""
    held = [node.meta.get("val") for node in joint.graph.nodes]
    devices = {each.device for each in held if isinstance(each, Tensor) and each.dim()}
    if len(devices) != 1:
        return  # a loop runs on one device
    for node in list(joint.graph.nodes):
        if node.target in _AXES:
            _replace(joint.graph, node)
    joint.recompile()


def _replace(graph: fx.Graph, pool: Any) -> None:
    items = [user for user in pool.users if user.target is operator.getitem]
    asked = [user for item in items if item.args[1] == 1 for user in item.users]
    x: Any = pool.args[0]
    axes = _AXES[pool.target]
    ours = all(each.target is _BACKWARD[axes] and each.args[1] is x for each in asked)
    window = _window(pool, axes)
    number = pitches(window)
    if number is None or not (ours and len(asked) == 1 and _may_loop(pool, x, axes)):
        return
    (backward,) = asked
    masked = _masked(backward, x)
    fields = ("taps", "stride", "padding", "dilation")
    columns = ([getattr(along, each) for along in window] for each in fields)
    described: Any = (*columns, bool(_argument(pool, 5, False)), list(number))
    with graph.inserting_before(pool):
        op = torch.ops.fusewright.max_pool_offsets.default
        arguments = (x, *described, masked is not None)
        made = graph.create_node("call_function", op, arguments, name="max_pool")
    values, indices = pool.meta["val"]
    made.meta = {**pool.meta, "val": (values, indices.to(torch.uint8))}
    for item in items:
        item.replace_input_with(pool, made)
        item.meta = {**item.meta, "val": made.meta["val"][item.args[1]]}
    sizes = list(x.meta["val"].shape[-axes:])
    with graph.inserting_before(backward):
        op = torch.ops.fusewright.max_pool_offsets_backward.default
        arguments = (backward.args[0], backward.args[7], sizes, *described)
        gathered = graph.create_node("call_function", op, arguments, name="max_pool_backward")
    last = masked or backward
    gathered.meta = dict(last.meta)
    last.replace_all_uses_with(gathered)
    for each in dict.fromkeys((last, backward)):
        graph.erase_node(each)
    graph.erase_node(pool)


def _window(pool: fx.Node, axes: int) -> Window:
    taps = _numbers(pool.args[1], axes)
    stride = _numbers(_argument(pool, 2, []) or taps, axes)
    padding, dilation = (_numbers(_argument(pool, at, each), axes) for at, each in ((3, 0), (4, 1)))
    return tuple(Along(*each) for each in zip(taps, stride, padding, dilation, strict=True))


def _argument(node: fx.Node, position: int, otherwise: Any) -> Any:
    return node.args[position] if len(node.args) > position else otherwise


def _numbers(value: Any, axes: int) -> list[int]:
    """One value per axis; PyTorch also accepts a single value for all axes."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    return items * axes if len(items) == 1 else items


def _may_loop(pool: fx.Node, x: Any, axes: int) -> bool:
    """Whether loops can handle tensors of these sizes and types."""
    held, made = x.meta["val"], pool.meta["val"][0]
    fixed = (*held.shape[-axes:], *made.shape[-axes:])
    if not all(isinstance(size, int) and size <= _LARGEST_SIZE for size in fixed):
        return False
    return held.dtype in _TYPES and not any(
        isinstance(size, int) and size == 0 for size in (*held.shape, *made.shape)
    )


def _masked(backward: fx.Node, x: Any) -> fx.Node | None:
    """where(x <= 0, 0, gradient), the gradient of ReLU, if nothing else reads the pool's gradient.

    At a maximum, x is the pool's result, so forward knows whether it is above zero.
    """
    users: list[Any] = list(backward.users)
    if len(users) != 1 or users[0].target is not torch.ops.aten.where.self:
        return None
    below, zero, gradient = users[0].args
    compares = below.target is torch.ops.aten.le.Scalar and below.args == (x, 0)
    number = zero.target in _ZEROS and zero.args[-1] == 0 and zero.meta["val"].dim() == 0
    same = users[0].meta["val"].dtype == backward.meta["val"].dtype
    return users[0] if compares and number and same and gradient is backward else None
