"""Planned for a GPU, no operator takes more launches than eager mode does, forward or backward.

A decomposition into gathers and scatters would be right, and many times as slow.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusewright.capture import capture
from fusewright.compile.explanation import steps_of
from fusewright.compile.planning import plan_programs
from fusewright.compile.stages import Stages
from fusewright.errors import CaptureError
from fusewright.target.target import Target
from tests.opdb.cases import Case, Entry, cases_of, entries
from tests.opdb.models import tensors_of

# Make a view, or nothing that takes time.
FREE = frozenset(
    "view _unsafe_view t transpose permute expand as_strided detach slice select unsqueeze squeeze "
    "alias unbind split split_with_sizes diagonal unfold view_as_real view_as_complex empty "
    "empty_like new_empty empty_strided new_empty_strided lift_fresh".split()
)
FEW = 3  # launches that are allowed in any case
KNOWN = {
    "bmm-triton_optimized": "eager's gradients come from Triton kernels, which are not counted",
    "linalg.eig": "complex numbers are PyTorch's calls, one for each operator",
    "linalg.lu_solve": "its gradients are solved on both sides",
    "lu_solve": "its gradients are solved on both sides",
    "polar": "complex numbers are PyTorch's calls, one for each operator",
}
NAMES = sorted({str(each) for each in entries("operator", ["float32"], "cpu")})
ALWAYS = [name for name in NAMES if "interpolate" in name or "upsample" in name or "pool" in name]
OTHERS = [pytest.param(name, marks=pytest.mark.sample(20)) for name in NAMES if name not in ALWAYS]


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that compute something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func.overloadpacket.__name__ not in FREE
        return func(*args, **(kwargs or {}))


def of_eager(case: Case) -> tuple[int, int]:
    model = case.make().train()
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in case.inputs]
    forward, backward = Launches(), Launches()
    with forward:
        outputs = [each for each in tensors_of(model(*inputs)) if each.requires_grad]
    if outputs:
        with backward:
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    return forward.count, backward.count


def of_ours(case: Case) -> tuple[int, int]:
    program = capture(case.make().train(), case.inputs, mode="train")
    plans = plan_programs([program], Target.cuda(), Stages())[-1]
    backward = () if plans.backward is None else steps_of(plans.backward)
    return sum(map(len, steps_of(plans.forward))), sum(map(len, backward))


@pytest.mark.parametrize("name", [*ALWAYS, *OTHERS])
def test_an_operator_takes_no_more_launches_than_in_eager_mode(name: str) -> None:
    operator = name.removesuffix(" float32")
    if operator in KNOWN or "sparse" in operator:
        pytest.skip(KNOWN.get(operator, "sparse tensors are left to eager mode"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases_of(Entry("operator", operator, "float32"), "cpu", ("first", "last")):
            if any(each.layout is not torch.strided for each in case.inputs):
                continue
            try:
                eager = of_eager(case)
            except (AssertionError, RuntimeError):
                continue  # eager mode refuses this case
            try:
                ours = of_ours(case)
            except CaptureError:
                continue  # left to Dynamo or the original forward
            for mine, theirs in zip(ours, eager, strict=True):
                assert mine <= max(theirs, FEW), (str(case), ours, eager)
