"""A model on the kernels that an H200 would run, without one: g++ builds their CUDA source, and
fibers stand for threads and tensor cores."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from fusewright.codegen import render as rendering
from fusewright.codegen.source import Source
from fusewright.compile.pipeline import prepare
from fusewright.rewrite import matmuls
from fusewright.runtime import tensor_cores
from fusewright.target.target import Target
from tests.support.emulated_modules import TRAINED, on_library, use_tensor_cores
from tests.support.tensor_cores_on_host import text_on_host, with_stand_in

PLANS = (*TRAINED, "inference")


@contextmanager
def gpu_on_host(all_on_tensor_cores: bool = False) -> Iterator[None]:
    """Plan and run for an H200 inside. On request even small matmuls and convolutions get kernels
    of ours; else they are PyTorch's calls, as on a GPU."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
        patches.setattr(torch.backends.cudnn, "allow_tf32", False)
        patches.setattr(rendering, "flattened", with_stand_in)
        if all_on_tensor_cores:
            use_tensor_cores(patches)
            patches.setattr(matmuls, "is_worthwhile", lambda *_: True)
        yield


def optimized_on_host(model: nn.Module, inputs: Sequence[Tensor]) -> nn.Module | None:
    """A copy of the model on emulated kernels, in its mode; None if PyTorch does all of it."""
    mode, args = "train" if model.training else "eval", tuple(inputs)
    device, target = torch.device("cpu"), Target.cuda()
    found = prepare(copy.deepcopy(model), args, modes=(mode,), device=device, target=target)
    if not found.source.entries:
        return None
    source = Source("host", text_on_host(found.source.text), found.source.entries)
    return on_library(model, args, found, source, PLANS)
