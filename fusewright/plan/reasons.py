"""Why an operator stays a PyTorch call, in the user's words: one sentence for each `Call`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusewright.ir.graph import HALF_DTYPES, Node, Ref, TensorSpec, contiguous_strides
from fusewright.ir.pool_offsets import MOST_TAPS
from fusewright.rewrite import convolutions
from fusewright.rewrite.joins import MOST as MOST_JOINED
from fusewright.rewrite.layouts import BACKWARD, FORWARD, is_channels_last
from fusewright.rewrite.pointwise import divides_integers_on_cpu
from fusewright.target.target import Target

_MATMULS = {
    "mm": "PyTorch's matmul",
    "addmm": "PyTorch's matmul",
    "bmm": "PyTorch's batched matmul",
    "baddbmm": "PyTorch's batched matmul",
}
_UNKNOWN = "we have no kernel for this operator"
_KNOWN = {
    "embedding": "it gathers by index, which our loops cannot do",
    "index": "it gathers by index, which our loops cannot do",
    "gather": "it gathers by index, which our loops cannot do",
    "literal": "a constant of the model",
    "_assert_async": "it raises an error if a condition of the model does not hold",
    "conv_tf32": "whether PyTorch's flags allow TF32 for convolutions",
    **dict.fromkeys(("mv", "addmv", "dot"), "a matmul with a vector, for which we have no kernel"),
}


def _faster(target: Target) -> str:
    """Our kernel could do the same on another machine or at another size."""
    if target.language == "host":
        return "it is the fastest one on this CPU"
    if target.tensor_cores:
        return "it is faster than our kernel at this size"
    return "our kernel runs on Hopper GPUs only"


def _matmul(name: str, dtype: str, target: Target) -> str:
    kind, on_gpu = _MATMULS[name], target.language != "host"
    if on_gpu and dtype in HALF_DTYPES:
        return f"{kind}: it runs {dtype} on tensor cores"
    if on_gpu and dtype != "float32":
        return f"{kind}: our kernel computes in float32, not in {dtype}"
    return f"{kind}: {_faster(target)}"


def _layout(node: Node, specs: Mapping[str, TensorSpec]) -> str:
    """A convolution's layout, if all its operands are channels-last."""
    given = [specs[name] for name in node.refs() if name in specs]
    images = [spec for spec in given if len(spec.shape) == len(given[0].shape)]
    plain = all(spec.strides == contiguous_strides(spec.shape) for spec in images)
    if plain or not all(map(is_channels_last, images)):
        return ""
    return "; it reads and writes channels-last, so it transposes nothing"


def _convolution(node: Node, specs: Mapping[str, TensorSpec], target: Target) -> str:
    """Names what our kernels do not support, if that is the reason."""
    kind = "PyTorch's convolution" + (" gradients" if node.op == BACKWARD else "")
    layout = _layout(node, specs)
    named = [] if layout or target.language == "host" else _fused_convolutions(node, specs)
    found = [convolutions.obstacle(each, *(specs[n] for n in each.refs())) for each in named]
    why = next((f"our kernel does not support {each}" for each in found if each), _faster(target))
    return f"{kind}: {why}{layout}"


def _fused_convolutions(node: Node, specs: Mapping[str, TensorSpec]) -> list[Node]:
    """A convolution, or those of its gradients that are needed, as nodes of our own kernels."""
    if node.op == FORWARD:
        return [convolutions.forward(node)]
    _, x, weight = (specs.get(arg.name) if isinstance(arg, Ref) else None for arg in node.args[:3])
    mask = node.args[-1]
    assert isinstance(mask, tuple)
    made = ((convolutions.by_source, x), (convolutions.by_weight, weight))
    wanted = [each for each, asked in zip(made, mask, strict=False) if asked]
    return [of(replace(node, spec=spec), node) for of, spec in wanted]


def _cat(node: Node) -> str:
    parts, dim = node.args[0], node.argument("dim", 1, 0)
    if isinstance(parts, tuple) and len(parts) > MOST_JOINED:
        return f"it joins {len(parts)} tensors, and our loops join at most {MOST_JOINED}"
    if node.spec is not None and dim in (-1, len(node.spec.shape) - 1):
        return "it joins along the last dimension, where PyTorch's copy is faster"
    return "a plain copy: no loop of ours computes with the joined tensor"


def reason(node: Node, specs: Mapping[str, TensorSpec], target: Target) -> str:
    if not node.is_aten:
        return _KNOWN.get(node.op, _UNKNOWN)
    if node.layer:
        return "PyTorch's recurrent layer: one call runs all its steps"
    name = node.op.split(".")[1]
    if name in _MATMULS:
        return _matmul(name, node.spec.dtype if node.spec is not None else "", target)
    if name in ("convolution", "convolution_backward"):
        return _convolution(node, specs, target)
    if name == "cat":
        return _cat(node)
    if divides_integers_on_cpu(node):
        return "a divisor of zero is an error on a CPU, and our loops cannot raise one"
    if name in _KNOWN:
        return _KNOWN[name]
    if "adaptive" in name:
        return "its windows differ in size, and our loops need equal ones"
    if "max_pool" in name:
        return f"its indices are used elsewhere, or a window has more than {MOST_TAPS} taps"
    if "pool" in name:
        many = f"more than {MOST_TAPS}"
        return f"windows have {many} taps and short rows, or {many} surround an element"
    if "rand" in name or "dropout" in name or "bernoulli" in name:
        return "it draws random numbers, which must come from PyTorch's generator"
    if "attention" in name:
        return "PyTorch's own fused attention kernel"
    return _UNKNOWN
