"""What kernels on tensor cores need to know: whether the GPU has them, and how precise to be."""

import os
import typing

import torch

from fusewright.runtime.call import _fw_here
from fusewright.runtime.gpu import _fw_has_tensor_cores
from fusewright.runtime.library import _fw_bound, _FwKernels

_FW_CORES: dict[int, bool] = {}


def _fw_tensor_cores(index: int) -> bool:
    """Whether the device has the tensor cores that the kernels are written for."""
    if index not in _FW_CORES:
        # Not get_device_capability, which torch.compile cannot trace.
        facts = torch.cuda.get_device_properties(index)
        _FW_CORES[index] = _fw_has_tensor_cores(facts.major, facts.minor)
    return _FW_CORES[index]


# If a program has used both the old and the new setting, reading the old one raises an error. This
# one can always be read, and every setting changes it.
_fw_precision: typing.Any = getattr(torch._C, "_get_fp32_precision_getter", None)


# With this, cuBLAS and cuDNN compute in float32 whatever the flags allow, and so do we.
_FW_NO_TF32 = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"


def _fw_terms() -> int:
    """3 fp16 terms for float32's precision, 1 if PyTorch itself may use TF32 for matmuls."""
    if _FW_NO_TF32:
        return 3
    if _fw_precision is None:
        return 1 if torch.backends.cuda.matmul.allow_tf32 else 3
    return 1 if _fw_precision("cuda", "matmul") == "tf32" else 3


# The getters behind torch.backends.cudnn, whose attributes take four times as long (0.4 µs each).
_fw_cudnn_enabled: typing.Callable[[], bool] = torch._C._get_cudnn_enabled
_fw_cudnn_benchmark: typing.Callable[[], bool] = torch._C._get_cudnn_benchmark
_fw_cudnn_deterministic: typing.Callable[[], bool] = torch._C._get_cudnn_deterministic


def _fw_conv_terms() -> int:
    """The same for convolutions, which have their own flag; without cuDNN there is no TF32."""
    if _FW_NO_TF32 or not _fw_cudnn_enabled():
        return 3
    if _fw_precision is None:
        return 1 if torch.backends.cudnn.allow_tf32 else 3
    return 1 if _fw_precision("cuda", "conv") == "tf32" else 3


_FW_TF32_FLAGS: dict[bool, tuple[torch.Tensor, dict[typing.Any, torch.Tensor]]] = {
    flag: (torch.tensor(flag), {}) for flag in (False, True)
}


def _fw_conv_tf32(where: torch.device) -> torch.Tensor:
    """Whether PyTorch may now use TF32 for convolutions, as a tensor that kernels read."""
    return _fw_here(*_FW_TF32_FLAGS[_fw_conv_terms() == 1], where)


class _FwPass(typing.NamedTuple):
    """A PyTorch convolution: `which` is "forward", or "input" or "weight" for a gradient."""

    which: str
    images: tuple[int, ...]
    image_strides: tuple[int, ...]
    weights: tuple[int, ...]
    weight_strides: tuple[int, ...]
    options: tuple[typing.Any, ...]
    device: torch.device


_FW_ROUNDS: dict[tuple[object, ...], bool] = {}


def _fw_convolution_terms(of: _FwPass) -> int:
    """The same for one convolution or gradient.

    Where TF32 is allowed, cuDNN still decides by shape whether to use it. It is tested once for
    each shape.
    """
    if _fw_conv_terms() == 3:
        return 3
    same = _fw_cudnn_deterministic() or torch.are_deterministic_algorithms_enabled()
    key = (of, _fw_cudnn_benchmark(), same)
    rounds = _FW_ROUNDS.get(key)
    if rounds is None:
        if torch.cuda.is_current_stream_capturing():
            return 3  # no test can run now
        rounds = _FW_ROUNDS[key] = _fw_rounds(of)
    return 1 if rounds else 3


def _fw_room(device: torch.device) -> int:
    """Free bytes of the device's memory, PyTorch's cache included."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _fw_middle(images: torch.Tensor) -> torch.Tensor:
    """The middle position of each image."""
    for _ in images.shape[2:]:
        images = images.select(2, images.shape[2] // 2)
    return images


def _fw_rounds(of: _FwPass) -> bool:
    """Whether PyTorch's convolution rounds its operands to TF32.

    A test convolution in which each result is one product: of a value that TF32 cannot represent
    and 1.
    """
    which, images, image_strides, weights, weight_strides, options, device = of
    if 0 in images or 0 in weights:
        return True  # nothing is computed, and one term needs no other kernels
    *_, transposed, _, groups = options
    odd = 1 + 2.0**-12
    kind: typing.Any = {"dtype": torch.float32, "device": "meta"}
    like = torch.empty_strided(images, image_strides, **kind)
    kernel = torch.empty_strided(weights, weight_strides, **kind)
    result = torch.ops.aten.convolution(like, kernel, None, *options)
    if 16 * (like.numel() + result.numel()) > _fw_room(device):
        return False  # the test would take memory that the model needs
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        x = torch.empty_like(like, device=device).fill_(odd)
        w = torch.empty_like(kernel, device=device).zero_()
        # Of the channels that are summed, only the first has weight 1, at the middle tap.
        added: typing.Any = (slice(None), slice(0, 1))
        if (which == "forward") == transposed:
            added = (slice(None, None, weights[0] // groups),)
        _fw_middle(w[added]).fill_(1)
        if which == "forward":
            found = torch.ops.aten.convolution(x, w, None, *options)
        else:
            grad_output = torch.empty_like(result, device=device).fill_(odd)
            if which == "weight":  # of the positions that are summed, one is not 0
                one, others = (x, grad_output) if transposed else (grad_output, x)
                _fw_middle(one.zero_()[:1]).fill_(odd)
                others.fill_(1)
            wanted = [which == "input", which == "weight", False]
            both = torch.ops.aten.convolution_backward(grad_output, x, w, None, *options, wanted)
            found = both[which == "weight"]
        return 0.5 < float(found.amax()) < (1 + odd) / 2


class _FwPrecisions(dict[int, typing.Any]):
    """An entry point by its number of terms; a missing one is built at its first use."""

    def __init__(self, build: typing.Callable[[int], None]) -> None:
        super().__init__()
        self._build = build

    def __missing__(self, terms: int) -> typing.Any:
        self._build(terms)
        return self[terms]


class _FwPreciseKernels(_FwKernels):
    """The same where PyTorch's flags decide how precise an entry point is.

    `entries` gives each one a macro of the text. `flags` returns how many terms are wanted now, and
    the entry point is indexed by its terms. The first library has the terms of that moment; most
    programs never change the flags.
    """

    def __init__(
        self,
        entries: dict[str, str],
        text: str,
        load: typing.Callable[..., typing.Any],
        flags: typing.Any = None,
    ) -> None:
        super().__init__(entries, text, load)
        self._flags = flags or _FW_TERMS

    def build(self) -> None:
        macros = sorted({*self._entries.values()} - {""})
        self._bind({"": 1, **{macro: self._flags[macro]() for macro in macros}}, macros)

    def _bind(self, terms: dict[str, int], macros: list[str]) -> None:
        """Bind the kernels of these macros, from their own library; others are left out."""
        names = {macro or "FW_OTHERS": terms.get(macro, 0) for macro in ("", *macros)}
        lines = [f"#define {name} {count}\n" for name, count in names.items()]
        text = "".join(lines) + self._text if macros else self._text
        wanted = [name for name, macro in self._entries.items() if macro in terms]
        for name, entry in _fw_bound(self._load, text, wanted).items():
            macro = self._entries[name]
            self._keep(name, macro, terms[macro], entry, macros)

    def _keep(
        self, name: str, macro: str, terms: int, entry: typing.Any, macros: list[str]
    ) -> None:
        if not macro:
            self.__dict__[name] = entry
            return
        empty = _FwPrecisions(lambda other: self._bind({macro: other}, macros))
        self.__dict__.setdefault(name, empty)[terms] = entry


# The number of terms by its macro in the kernels' text.
_FW_TERMS: dict[str, typing.Any] = {
    "FW_MATMULS": _fw_terms,
    "FW_CONVOLUTIONS": _fw_conv_terms,
}
