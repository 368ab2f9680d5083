"""Common mistakes of people who write kernels, in their own words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from fusewright.judge.script import Step
from fusewright.verify.compare import Check
from fusewright.verify.figures import wide

_UNWRITTEN = 1.6e38
_LOW_PRECISION = (2e-5, 3e-2)

_MISSING_SCALAR = (
    "the gradient of the scalar parameter {name} is missing: `.item()` or `float()` takes a value "
    "out of the graph, so pass the tensor itself"
)
_MISSING_ALL = (
    "no gradient arrives at all: forward has no backward; write an autograd.Function with one"
)
_BY_STEP = {
    "new weights": "the weights were read at construction or at an earlier call; read them in "
    "every forward, or compare their `_version` first",
    "the same addresses": "an address or a tensor object is no key for a cache: its values change",
    "the same values again": "a result was kept by the values of its input; weights and modes "
    "count, too",
    "one other element": "a part of the input is no key for a cache",
    "the same rows in another order": "a sum or a norm of the input is no key for a cache",
    "gradients added up": "a second backward through the same graph must give the same gradients, "
    "and add to `.grad`",
    "small inputs": "the formula holds for the example's range only",
    "rows of many sizes": "the formula holds for the example's range only, or small rows lose "
    "their digits beside large ones",
    "inputs of one sign": "the formula holds for the example's range only",
    "a deep copy": "a deep copy of the module still reads the original's weights",
    "a pickled copy": "a pickled module still reads old weights; keep what is packed out of "
    "`__getstate__`, or compare versions",
    "another instance": "modules share what only one of them may hold; keep it on `self`",
    "loaded weights": "`load_state_dict` writes weights in place: packed ones must be packed again",
    "two forwards, then two backwards": "backward used what the last forward left on `self`; save "
    "tensors in the autograd context",
    "inputs not contiguous": "contiguity is assumed; use strides or call `.contiguous()` first",
    "inputs need no gradient": "gradients of weights must not depend on those of inputs",
    "weights need no gradient": "the gradients of inputs must not depend on those of weights",
    "some gradients only": "a gradient must not depend on which others are asked for",
    "other numbers": "a number among the arguments may change from call to call",
    "gradients of some outputs only": "backward gets None for an output that the loss does not "
    "use; treat it as zeros",
    "inputs at odd addresses": "an input may begin at any element; wide loads need alignment",
    "fewer rows": "the kernel holds for the example's sizes only",
    "one row": "the kernel holds for the example's sizes only",
    "more rows": "the kernel holds for the example's sizes only",
    "inputs × 200": "the formula holds for the example's range only; softmax and its like "
    "must subtract the maximum before exp",
    "shifted inputs": "the formula holds for the example's range only; a variance as "
    "E[x²] − E[x]² cancels",
    "zeros in the inputs": "a row of zeros must give what it gives in PyTorch, be it NaN",
    "NaN in the inputs": "NaN must spread as in PyTorch; `fmaxf` and `fminf` drop it",
    "infinities in the inputs": "infinities must spread as in PyTorch",
}


def missing_gradient(name: str, gradients: Mapping[str, object], scalar: bool) -> str:
    """Why a gradient is missing."""
    if all(each is None for each in gradients.values()):
        return _MISSING_ALL
    if scalar:
        return _MISSING_SCALAR.format(name=name)
    return f"the gradient of {name} is missing: backward must return one for it"


def wrong_value(step: Step, check: Check, ours: object) -> str:
    """What a wrong value may come from; empty if nothing is known."""
    if isinstance(ours, Tensor) and ours.is_floating_point() and _is_unwritten(ours):
        return "a part of the result was never written, or it was computed from unwritten memory"
    if "buffer " in check.name:
        return "buffers such as running statistics must be updated as the model does it"
    if _LOW_PRECISION[0] < check.error < _LOW_PRECISION[1] and step.name not in _BY_STEP:
        return "errors of this size come from TF32, fp16 or bf16, among other causes"
    if "gradient" in step.name and step.layout != "contiguous":
        return "incoming gradients may have any strides; use them or call `.contiguous()` first"
    return _BY_STEP.get(step.name, "")


def _is_unwritten(ours: Tensor) -> bool:
    values = wide(ours)
    return bool(((values.abs() > _UNWRITTEN) & values.isfinite()).any())


def worst_element(ours: Tensor, truth: Tensor) -> tuple[str, str, str]:
    """Where a tensor is most wrong, and the two values there."""
    mine, exact = wide(ours), wide(truth)
    off = (mine - exact).abs()
    off[off.isnan()] = math.inf
    both_nan = mine.isnan() & exact.isnan()
    off[both_nan | (mine == exact)] = 0.0
    flat = int(off.argmax())
    index: list[int] = []
    for size in reversed(off.shape):
        index.insert(0, flat % size)
        flat //= size
    place = f"[{', '.join(map(str, index))}]" if index else ""
    return place, f"{float(exact[tuple(index)]):.7g}", f"{float(mine[tuple(index)]):.7g}"
