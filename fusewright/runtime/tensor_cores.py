"""What matrix products ask before they run: the right tensor cores, and how precise to be."""

import os
import typing

import torch

_FW_CORES: dict[int, bool] = {}


def _fw_tensor_cores(index: int) -> bool:
    """Whether the device has the tensor cores that the products are written for."""
    if index not in _FW_CORES:
        # Not get_device_capability: this one torch.compile can trace.
        facts = torch.cuda.get_device_properties(index)
        _FW_CORES[index] = (facts.major, facts.minor) == (9, 0)
    return _FW_CORES[index]


# Where both old and new settings were used, the old one refuses to be read; this one never does,
# and every way of setting sets it.
_fw_precision: typing.Any = getattr(torch._C, "_get_fp32_precision_getter", None)


# With this PyTorch's library computes in float32 whatever the flags allow, and so do we.
_FW_NO_TF32 = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"


def _fw_terms() -> int:
    """3 halves' products for float32's precision, 1 where PyTorch itself may use TF32."""
    if _FW_NO_TF32:
        return 3
    if _fw_precision is None:
        return 1 if torch.backends.cuda.matmul.allow_tf32 else 3
    return 1 if _fw_precision("cuda", "matmul") == "tf32" else 3


def _fw_window_terms() -> int:
    """The same for convolutions, which have a flag of their own, and none without cuDNN."""
    if _FW_NO_TF32 or not torch.backends.cudnn.enabled:
        return 3
    if _fw_precision is None:
        return 1 if torch.backends.cudnn.allow_tf32 else 3
    return 1 if _fw_precision("cuda", "conv") == "tf32" else 3


class _FwPass(typing.NamedTuple):
    """A convolution of PyTorch's, `which` "forward", or its gradient by its "input" or "weight"."""

    which: str
    images: tuple[int, ...]
    image_strides: tuple[int, ...]
    weights: tuple[int, ...]
    weight_strides: tuple[int, ...]
    numbers: tuple[typing.Any, ...]
    device: torch.device


_FW_ROUNDS: dict[tuple[object, ...], bool] = {}


def _fw_convolution_terms(of: _FwPass) -> int:
    """The same for one convolution or gradient.

    Where TF32 is allowed, PyTorch's library still decides by shape whether to use it: it is asked,
    once for each.
    """
    if _fw_window_terms() == 3:
        return 3
    cudnn = torch.backends.cudnn
    same = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    key = (of, cudnn.benchmark, same)
    if key not in _FW_ROUNDS:
        if torch.cuda.is_current_stream_capturing():
            return 3  # nothing can be asked now
        _FW_ROUNDS[key] = _fw_rounds(of)
    return 1 if _FW_ROUNDS[key] else 3


def _fw_room(device: torch.device) -> int:
    """Bytes that are free."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _fw_middle(images: torch.Tensor) -> torch.Tensor:
    """The position in the middle of each."""
    for _ in images.shape[2:]:
        images = images.select(2, images.shape[2] // 2)
    return images


def _fw_rounds(of: _FwPass) -> bool:
    """Whether PyTorch's convolution rounds what it multiplies to TF32.

    Each result is one number that TF32 does not have, times one.
    """
    which, images, image_strides, weights, weight_strides, numbers, device = of
    if 0 in images or 0 in weights:
        return True  # of nothing; no other kernels are built for that
    *_, transposed, _, groups = numbers
    odd = 1 + 2.0**-12
    kind: typing.Any = {"dtype": torch.float32, "device": "meta"}
    like = torch.empty_strided(images, image_strides, **kind)
    kernel = torch.empty_strided(weights, weight_strides, **kind)
    result = torch.ops.aten.convolution(like, kernel, None, *numbers)
    if 16 * (like.numel() + result.numel()) > _fw_room(device):
        return False  # asking would take what the model needs
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        x = torch.empty_like(like, device=device).fill_(odd)
        w = torch.empty_like(kernel, device=device).zero_()
        # Of the channels that are added up, the first alone counts, by its middle tap.
        added: typing.Any = (slice(None), slice(0, 1))
        if (which == "forward") == transposed:
            added = (slice(None, None, weights[0] // groups),)
        _fw_middle(w[added]).fill_(1)
        if which == "forward":
            found = torch.ops.aten.convolution(x, w, None, *numbers)
        else:
            change = torch.empty_like(result, device=device).fill_(odd)
            if which == "weight":  # of the positions that are added up, one
                one, others = (x, change) if transposed else (change, x)
                _fw_middle(one.zero_()[:1]).fill_(odd)
                others.fill_(1)
            wanted = [which == "input", which == "weight", False]
            both = torch.ops.aten.convolution_backward(change, x, w, None, *numbers, wanted)
            found = both[which == "weight"]
        return 0.5 < float(found.amax()) < (1 + odd) / 2


# By the macro that stands for them in the kernels' text.
_FW_TERMS: dict[str, typing.Any] = {
    "FW_PRODUCTS": _fw_terms,
    "FW_CONVOLUTIONS": _fw_window_terms,
}
