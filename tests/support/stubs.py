"""Plain host loops in place of the tensor-core kernels: fast to compile, exact to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright.codegen import convolution as convolution_text
from fusewright.codegen import weight_gradient as gradient
from fusewright.runtime import tensor_cores

MATMUL_STUB = Path(__file__).parent / "matmul_on_host.cuh"
CONVOLUTION_STUB = Path(__file__).parent / "convolution_on_host.cuh"


def stub_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build convolutions and their gradients from plain loops on the host."""
    monkeypatch.setattr(convolution_text, "HEADER", str(CONVOLUTION_STUB))
    monkeypatch.setattr(gradient, "HEADER", str(CONVOLUTION_STUB))
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
