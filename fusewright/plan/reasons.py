"""Why an operator stays a call to PyTorch, in words that a user can act on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusewright.ir.graph import HALVES, Node, Ref, TensorSpec, contiguous_strides
from fusewright.rewrite import convolutions as windows
from fusewright.rewrite.layouts import BACKWARD, FORWARD, is_channels_last

# Of what our kernels could do: on another machine, or at another size, they would.
_FASTER = "ours is for Hopper GPUs, at sizes where it is faster"
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_KNOWN = {
    "cat": "it joins tensors along lanes, too many, or nobody computes with them: a copy",
    "embedding": "it gathers by index",
    "index": "it gathers by index",
    "gather": "it gathers by index",
    "literal": "a constant of the model",
    **dict.fromkeys(("mv", "addmv", "dot"), "a product with a vector, which no kernel of ours has"),
}


def _product(name: str, dtype: str) -> str:
    """A kernel of ours takes the large float32 products, on Hopper."""
    if dtype in HALVES:
        return f"a matrix product in {dtype}, which PyTorch's library runs on tensor cores"
    if dtype == "float64":
        return "a matrix product in float64, which halves cannot hold"
    if name in ("bmm", "baddbmm"):
        return f"a batch of matrix products: {_FASTER}"
    return f"a matrix product: {_FASTER}"


def _layout(node: Node, specs: Mapping[str, TensorSpec]) -> str:
    """A convolution's layout, if all that it is given lies in channels-last."""
    given = [specs[name] for name in node.refs() if name in specs]
    images = [spec for spec in given if len(spec.shape) == len(given[0].shape)]
    plain = all(spec.strides == contiguous_strides(spec.shape) for spec in images)
    if plain or not all(map(is_channels_last, images)):
        return ""
    return "; in channels-last, which its kernels take and give without transposing"


def _convolution(node: Node, specs: Mapping[str, TensorSpec]) -> str:
    """What our kernels cannot do, if that is why; small ones and other GPUs are PyTorch's, too."""
    backward = node.op == BACKWARD
    kind = "the gradients of a convolution" if backward else "a convolution"
    layout = _layout(node, specs)
    found = [] if layout else [_obstacle(each, specs) for each in _windows(node, specs)]
    why = next((f" {each}, which ours cannot do" for each in found if each), f": {_FASTER}")
    return f"{kind}{why}{layout}"


def _windows(node: Node, specs: Mapping[str, TensorSpec]) -> list[Node]:
    """A convolution, or those of its gradients that are wanted, as our kernels would have it."""
    if node.op == FORWARD:
        return [windows.forward(node)]
    _, x, weight = (specs.get(arg.name) if isinstance(arg, Ref) else None for arg in node.args[:3])
    mask = node.args[-1]
    assert isinstance(mask, tuple)
    made = ((windows.by_source, x), (windows.by_weight, weight))
    wanted = [each for each, asked in zip(made, mask, strict=False) if asked]
    return [of(replace(node, spec=spec), node) for of, spec in wanted]


def _obstacle(node: Node, specs: Mapping[str, TensorSpec]) -> str:
    return windows.obstacle(node, *(specs[name] for name in node.refs()))


def reason(node: Node, specs: Mapping[str, TensorSpec]) -> str:
    if not node.is_aten:
        return _KNOWN.get(node.op, "no loop is known for it")
    if node.layer:
        return "recurrent layers stay PyTorch's: one call for all of the steps"
    name = node.op.split(".")[1]
    if name in _PRODUCTS:
        return _product(name, node.spec.dtype if node.spec is not None else "")
    if name in ("convolution", "convolution_backward"):
        return _convolution(node, specs)
    if name in _KNOWN:
        return _KNOWN[name]
    if "adaptive" in name:
        return "its windows differ in size"
    if "max_pool" in name:
        return "more than its gradient asks where the largest values lie, or windows have many taps"
    if "pool" in name:
        return "windows have many taps, or it is the gradient of overlapping ones"
    if "rand" in name or "dropout" in name or "bernoulli" in name:
        return "it draws random numbers, which must be PyTorch's own"
    if "attention" in name:
        return "a fused attention kernel of PyTorch's"
    return "it is outside the op table"
