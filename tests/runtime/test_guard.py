"""Which tensors the kernels were not written for, and what is said of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusewright.runtime.guard import _fw_misfits

ROW = ("argument 0", torch.float32, (4, 6), (6, 1), True)
CPU = torch.device("cpu")


class Tagged(Tensor):
    """A subclass, which may redefine any operator."""


MISFITS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "another dtype of the same size": (lambda x: x.view(torch.int32), "is torch.int32"),
    "a wider dtype": (lambda x: x.double(), "is torch.float64"),
    "another number of rows": (lambda x: x[:3], r"has shape \(3, 6\)"),
    "another number of columns": (lambda x: torch.zeros(4, 5), r"has shape \(4, 5\)"),
    "another rank": (lambda x: x[None], r"has shape \(1, 4, 6\)"),
    "rows with gaps": (lambda x: torch.zeros(4, 9)[:, :6], r"has strides \(9, 1\)"),
    "columns with gaps": (lambda x: torch.zeros(4, 12)[:, ::2], r"has strides \(12, 2\)"),
    "expanded rows": (lambda x: x[:1].expand(4, 6), r"has strides \(0, 1\)"),
    "a transposed matrix": (lambda x: torch.zeros(6, 4).t(), r"has strides \(1, 4\)"),
    "coordinates": (lambda x: x.to_sparse(), "is torch.sparse_coo"),
    "compressed rows": (lambda x: x.to_sparse_csr(), "is torch.sparse_csr"),
    "compressed blocks": (lambda x: x.to_sparse_bsr((2, 2)), "is torch.sparse_bsr"),
    "another device": (lambda x: x.to("meta"), "is on meta"),
    "a gradient": (lambda x: x.requires_grad_(), "requires a gradient"),
    "a subclass": (lambda x: x.as_subclass(Tagged), "is a Tagged"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_misfits_are_named(what: str) -> None:
    change, words = MISFITS[what]
    x = torch.ones(4, 6)
    assert _fw_misfits([x], [ROW], CPU) is None
    said = _fw_misfits([x, change(x)], [ROW, ROW], CPU)
    assert said is not None and said.startswith("argument 0 ")
    with pytest.raises(RuntimeError, match=words):
        raise RuntimeError(said)


FITTING: dict[str, Callable[[], tuple[Tensor, tuple[int, ...]]]] = {
    "a parameter": lambda: (nn.Parameter(torch.ones(4, 6), requires_grad=False), (6, 1)),
    "a row, whose stride does not matter": lambda: (torch.ones(3, 6)[:1], (100, 1)),
    "no rows": lambda: (torch.ones(0, 6).t().contiguous().t(), (6, 1)),
}


@pytest.mark.parametrize("what", FITTING)
def test_what_fits(what: str) -> None:
    x, strides = FITTING[what]()
    row = ("argument 0", x.dtype, tuple(x.shape), strides, True)
    assert _fw_misfits([x], [row], CPU) is None


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_gradients_matter_where_they_are_recorded(off: Callable[[], object]) -> None:
    x = torch.ones(4, 6, requires_grad=True)
    with off():  # type: ignore[attr-defined]
        refused = _fw_misfits([x], [ROW], CPU) is not None
    assert refused is (off is contextlib.nullcontext)
    assert _fw_misfits([x], [(*ROW[:4], False)], CPU) is None


def test_contiguous_where_no_strides_are_given() -> None:
    row = (*ROW[:3], None, False)
    assert _fw_misfits([torch.ones(4, 6)], [row], CPU) is None
    said = _fw_misfits([torch.ones(6, 4).t()], [row], CPU)
    assert said is not None and "instead of contiguous ones" in said
