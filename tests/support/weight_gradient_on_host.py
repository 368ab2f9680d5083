"""The tensor-core kernel of weight gradients, built by g++ and run on fibers."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.convolution_entry_on_host import Sizes
from tests.support.convolution_on_host import UNSEEN, Strided, five_strides
from tests.support.tensor_cores_on_host import host_library, on_host, with_stand_in
from tests.support.tensors import error

GUARD = 16  # floats behind the workspace
BODY = r"""
#define ENTRY(terms)                                                                              \
  extern "C" int gradient_##terms(                                                                \
      const fw::ConvInput* x, const fw::ConvInput* dy, const fw::WeightGradient* dw,              \
      const fw::ConvolutionSizes* sizes, int parts, void* workspace) {                            \
    memset(emulated_shared, 0xff, sizeof(emulated_shared));  /* NaN */                            \
    return fw::weight_gradient<terms>(*x, *dy, *dw, *sizes, parts, workspace, 0, nullptr);        \
  }
ENTRY(1)
ENTRY(3)
extern "C" int parts_of(const fw::ConvolutionSizes* sizes, int terms, int processors) {
  return fw::weight_gradient_parts(*sizes, terms, processors);
}
extern "C" int64_t bytes_of(const fw::ConvolutionSizes* sizes, int parts) {
  return fw::weight_gradient_bytes(*sizes, parts);
}
"""
# Matmuls run once the converting warps have had time for the next slab: rows that are overwritten
# too soon come out wrong.
PROMPT = "  ++emulation::progress;\n  give_way();\n"
LATE = "  for (int turn = 0; turn < 32; ++turn) ++emulation::progress, give_way();\n"


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel's own text, its instructions replaced by the stand-ins."""
    text = on_host(
        "\n".join([*with_stand_in("sm90/gradient/sm90_weight_gradient.cuh", set()), BODY])
    )
    assert text.count(PROMPT) == 1
    built = host_library(text.replace(PROMPT, LATE))
    built.bytes_of.restype = ctypes.c_int64
    return built


@dataclass(frozen=True)
class Gradient:
    """A convolution and the settings of the kernel of its weight gradient."""

    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    terms: int = 1
    band_width: int | None = None  # the whole width
    parts: int = 2
    mends: bool = False  # whether sums may have to be computed again

    def sizes(self, x: Tensor, dy: Tensor, kernel: tuple[int, ...]) -> Sizes:
        sizes = Sizes(x.shape[0])
        sizes.counts[:] = (self.groups, x.shape[1] // self.groups, dy.shape[1] // self.groups)
        sizes.z = (1, 1, 1, 1, 1, 0)
        for axis, name in enumerate("zyx"[-len(kernel) :]):
            known = (x.shape[2 + axis], dy.shape[2 + axis], kernel[axis])
            chosen = (self.stride[axis], self.dilation[axis], self.padding[axis])
            setattr(sizes, name, (ctypes.c_int * 7)(*known, *chosen))
        sizes.band_width = self.band_width or dy.shape[-1]
        return sizes

    def dy_shape(self, x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, ...]:
        out = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                x[2:], w[2:], self.stride, self.padding, self.dilation, strict=True
            )
        )
        return (x[0], w[0], *out)

    def exact(self, x: Tensor, dy: Tensor, w: tuple[int, ...]) -> Tensor:
        settings = (self.stride, self.padding, self.dilation, self.groups)
        by_weight = torch.nn.grad.conv2d_weight if len(w) == 4 else torch.nn.grad.conv3d_weight
        return by_weight(x.double(), w, dy.double(), *settings)

    def run(self, x: Tensor, dy: Tensor, dw: Tensor) -> Tensor:
        """Run the kernel into dw. Every element is written, and nothing behind the workspace.

        Sums that are not finite are computed again, which would hide wrong sums of the tensor
        cores.
        """
        dw.fill_(UNSEEN)
        sizes = self.sizes(x, dy, tuple(dw.shape[2:]))
        size = library().bytes_of(ctypes.byref(sizes), self.parts) // 4
        workspace = torch.full((size + GUARD,), math.nan)
        workspace[size:] = UNSEEN
        code = getattr(library(), f"gradient_{self.terms}")(
            *(ctypes.byref(Strided(each.data_ptr(), five_strides(each))) for each in (x, dy, dw)),
            ctypes.byref(sizes),
            self.parts,
            ctypes.c_void_p(workspace.data_ptr()),
        )
        assert code == 0 and not (dw == UNSEEN).any() and (workspace[size:] == UNSEEN).all()
        assert self.mends or workspace.isfinite().all() or not dy.numel()
        return dw


def check(gradient: Gradient, x: Tensor, dy: Tensor, w: tuple[int, ...]) -> None:
    found = error(gradient.run(x, dy, torch.empty(w)), gradient.exact(x, dy, w))
    assert found < (6e-4 if gradient.terms == 1 else 4e-7)
