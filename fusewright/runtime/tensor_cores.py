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


def _fw_convolution_terms() -> int:
    """The same for convolutions, which have a flag of their own, and none without cuDNN."""
    if _FW_NO_TF32 or not torch.backends.cudnn.enabled:
        return 3
    if _fw_precision is None:
        return 1 if torch.backends.cudnn.allow_tf32 else 3
    return 1 if _fw_precision("cuda", "conv") == "tf32" else 3
