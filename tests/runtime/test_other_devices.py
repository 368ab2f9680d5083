"""Values on another device than the kernels': gradients that nobody gave, and fake results."""

from __future__ import annotations

import types
from typing import Any

import torch

from fusewright.emit.python import layout
from fusewright.ir.graph import TensorSpec, contiguous_strides, dim
from fusewright.runtime.call import _fw_empty, _fw_taken
from fusewright.runtime.operators import _fw_where

HERE, META = torch.device("cpu"), torch.device("meta")


def test_a_missing_gradient_is_zeros_on_the_device_of_its_output() -> None:
    layouts = ((torch.float32, (2, 3), (3, 1)), (torch.float64, (4,), (1,), "meta"))
    here, there = _fw_taken([None, None], layouts, HERE)
    assert here.device == HERE and torch.equal(here, torch.zeros(2, 3))
    assert (there.device, there.dtype, there.shape) == (META, torch.float64, (4,))


def test_the_device_of_the_kernels_is_not_that_of_a_number_elsewhere() -> None:
    mode: Any = types.SimpleNamespace(device_type="cpu")
    assert _fw_where(mode, [torch.empty((), device=META), torch.empty(3)]) == HERE
    assert _fw_where(mode, [torch.empty((), device=META)]) == META
    assert _fw_empty((torch.int64, (2,), (1,), "meta"), HERE).device == META


def test_a_layout_names_a_device_that_is_not_the_kernels() -> None:
    shape = (dim(2), dim(3))
    spec = TensorSpec("float32", shape, contiguous_strides(shape), "cpu")
    assert layout(spec, "cpu") == ["torch.float32", "(2, 3)", "(3, 1)"]
    assert layout(spec, "cuda")[3:] == ['"cpu"']
