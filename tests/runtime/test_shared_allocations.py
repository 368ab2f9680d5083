"""Values that only kernels read share one allocation, and no others do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fusewright.codegen.source import Source
from fusewright.compile.call_kinds import arguments_of
from fusewright.compile.module import optimized
from fusewright.emit.bundle import ModuleBundle, ProgramPlans
from fusewright.emit.text import module_text
from fusewright.ir.graph import Binding, ForwardOutput, Ref
from fusewright.plan.steps import Step
from tests.support.handmade import (
    PRELUDE,
    S0,
    Case,
    aten,
    entry,
    loop,
    plan,
    program,
    spec,
    with_calls,
)
from tests.support.tensors import assert_same

KERNELS = (
    PRELUDE
    + """
extern "C" int fw_parts(const float* x, float* twice, float* most, int64_t s0, void*, int, void*) {
  for (int64_t i = 0; i < s0; ++i) {
    most[i] = x[i * WIDTH];
    for (int64_t j = 0; j < WIDTH; ++j) {
      twice[i * WIDTH + j] = 2 * x[i * WIDTH + j];
      if (x[i * WIDTH + j] > most[i]) most[i] = x[i * WIDTH + j];
    }
  }
  return 0;
}
extern "C" int fw_joined(const float* x, const float* twice, const float* most, float* y,
                         int64_t s0, void*, int, void*) {
  for (int64_t i = 0; i < s0 * WIDTH; ++i) y[i] = x[i] + twice[i] * most[i / WIDTH];
  return 0;
}
"""
)


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2 * x * x.amax(1, keepdim=True)


PARTS = entry("fw_parts", "x", "twice", "most")
JOINED = entry("fw_joined", "x", "twice", "most", "y")


def case(width: int, kind: str) -> Case:
    """`kind` says what keeps the outputs of the first kernel apart, if anything does."""
    like = spec(S0, width)
    order = ("twice", "x", "most") if kind == "asked for the device" else ("x", "twice", "most")
    steps: list[Step] = [
        loop(PARTS, ("x",), ("twice", "most"), "mul amax"),
        loop(JOINED, order, ("y",), "mul add"),
    ]
    if kind == "read by PyTorch":
        steps.append(aten("z", "aten.neg.default", Ref("most"), out=spec(S0)))
    if kind == "read by halves":
        steps.append(loop(PARTS, ("most",), ("a", "b"), "mul amax"))
    outputs = ("y", "most") if kind == "given out" else ("y",)
    specs = {"twice": like, "most": spec(S0), "y": like, "z": spec(S0)}
    specs |= {"a": like, "b": spec(S0)}
    forward = plan({"x": like}, steps, outputs, specs)
    plans = (forward, forward, None)
    results = tuple(ForwardOutput("output", index) for index in range(len(outputs)))
    made = program("train", (Binding("input", "0", True),), results, (), plans)
    model, args = Model(), (torch.randn(4, width),)
    source = Source("host", with_calls(KERNELS.replace("WIDTH", str(width))), (PARTS, JOINED))
    modes = (ProgramPlans(made, *plans),)
    bundle = ModuleBundle("together", "host", source, arguments_of(model, args), modes)
    return Case(model, args, bundle, "")


ONE = "a1 = _fw_host_memory((256 * s0 + 4 * s0,), (1,), torch.uint8)"


@pytest.mark.parametrize(
    ("width", "kind", "together"),
    [
        (64, "kernels alone", True),
        (65, "badly aligned", False),
        (64, "given out", False),
        (64, "read by PyTorch", False),
        (64, "read by halves", False),
        (64, "asked for the device", False),
    ],
)
def test_who_shares_an_allocation(width: int, kind: str, together: bool) -> None:
    text = module_text(case(width, kind).bundle).tables
    assert (ONE in text) == ("a2 = _FwAddress(a1.data_ptr() + 256 * s0)" in text) == together
    assert ("a2 = _fw_host_memory((s0,), (1,), torch.float32)" in text) != together


@pytest.mark.parametrize("rows", [4, 1, 0, 37])
def test_kernels_find_what_shares_an_allocation(rows: int, tmp_path: Path) -> None:
    made = case(64, "kernels alone")
    fast = optimized(made.model, made.modes(tmp_path))
    x = torch.randn(rows, 64)
    assert_same(fast(x), made.model(x))
