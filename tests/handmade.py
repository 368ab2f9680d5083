"""Hand-written programs with their plans and host kernels, to test what runs them.

Each case is what the front end would make of a small model, written out so that the run time
and the emitted text are tested on their own.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fusewright.codegen.source import Entry, Source
from fusewright.emit import ModuleBundle, ProgramPlans
from fusewright.ir import (
    ONE,
    ZERO,
    Binding,
    Dim,
    Graph,
    Input,
    Node,
    Program,
    Ref,
    Result,
    Symbol,
    TensorSpec,
    contiguous_strides,
)
from fusewright.loop import Argument, LoopKernel
from fusewright.module import Modes, arguments_of, load, owners_of
from fusewright.plan.steps import Call, Loop, Plan, Step, View

S0 = Dim(1, ("s0",))
PRELUDE = """#include <cstdint>
#include <cmath>
extern "C" const char* fw_error_text(int code) { return code == 7 ? "seven" : "unknown"; }
"""


def spec(*shape: Dim | int, dtype: str = "float32") -> TensorSpec:
    dims = tuple(each if isinstance(each, Dim) else Dim(each) for each in shape)
    return TensorSpec(dtype, dims, contiguous_strides(dims))


def entry(
    name: str, *arguments: str, symbols: tuple[str, ...] = ("s0",), workspace: Dim = ZERO
) -> Entry:
    return Entry(name, arguments, symbols, workspace)


def loop(made: Entry, inputs: tuple[str, ...], outputs: tuple[str, ...], operators: str) -> Loop:
    n_inputs = len(inputs)
    arguments = tuple(
        Argument(name, "float32", index >= n_inputs) for index, name in enumerate(made.arguments)
    )
    kernel = LoopKernel(made.name, operators, (), (), arguments, made.symbols, ())
    name = "custom_" + operators.replace(" ", "_")
    return Loop(name, kernel, inputs, outputs, tuple(operators.split()), 1024, 256)


def aten(name: str, op: str, *args: object, out: TensorSpec | None) -> Call:
    return Call(Node(name, op, args, (), out), (name,), "a product", 4096, 8192)  # type: ignore[arg-type]


def view(name: str, op: str, *args: object, out: TensorSpec) -> View:
    return View(Node(name, op, args, (), out))  # type: ignore[arg-type]


def plan(
    inputs: dict[str, TensorSpec],
    steps: list[Step],
    outputs: tuple[str | Dim | None, ...],
    specs: dict[str, TensorSpec],
) -> Plan:
    known = {**inputs, **specs}
    named = tuple(Input(name, each) for name, each in inputs.items())
    return Plan(named, tuple(steps), outputs, tuple(known.items()))


def graph_of(made: Plan) -> Graph:
    return Graph(made.inputs, (), made.outputs)


def program(
    mode: str,
    bindings: tuple[Binding, ...],
    results: tuple[Result, ...],
    tangents: tuple[int, ...],
    plans: tuple[Plan, Plan, Plan | None],
    output_tree: str = "o[0]",
    symbols: tuple[Symbol, ...] = (Symbol("s0", 0, 0, 4),),
    guards: tuple[str, ...] = (),
) -> Program:
    forward, inference, backward = plans
    return Program(
        mode,
        bindings,
        symbols,
        guards,
        graph_of(forward),
        results,
        graph_of(backward) if backward else None,
        tangents,
        graph_of(inference),
        output_tree,
    )


def compiled(source: Source, folder: Path) -> ctypes.CDLL:
    text, built = folder / "kernels.cpp", folder / "kernels.so"
    text.write_text(source.text)
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fopenmp"]
    subprocess.run(["g++", *flags, str(text), "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


@dataclass(frozen=True)
class Case:
    """A model, an example call, and what was made of it."""

    model: nn.Module
    args: tuple[object, ...]
    bundle: ModuleBundle
    source: str

    def modes(self, folder: Path) -> Modes:
        return load(self.bundle, compiled(self.bundle.source, folder))


def with_owners(case: Case) -> Case:
    """The case with the guard on the model's constants, as the pipeline adds it."""
    modes = tuple(
        replace(each, owners=owners_of(case.model, each.program.mode)) for each in case.bundle.modes
    )
    return replace(case, bundle=replace(case.bundle, modes=modes))


GEMM_SOURCE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, n_in=3, n_out=5):
        super().__init__()
        self.gemm = nn.Linear(n_in, n_out, bias=False)
        self.bias = nn.Parameter(torch.randn(n_out))

    def forward(self, x):
        return torch.relu(self.gemm(x) + self.bias)


def get_inputs():
    return [torch.randn(4, 3)]


def get_init_inputs():
    return [3, 5]
"""

GEMM_KERNELS = (
    PRELUDE
    + """
extern "C" int fw_add_relu(const float* mm, const float* bias, float* out, int64_t s0,
                           void* workspace, int threads, void* stream) {
  for (int64_t i = 0; i < s0; ++i)
    for (int64_t j = 0; j < 5; ++j) {
      float v = mm[i * 5 + j] + bias[j];
      out[i * 5 + j] = v > 0 || std::isnan(v) ? v : 0;
    }
  return 0;
}
extern "C" int fw_relu_backward(const float* tangent, const float* out, float* grad, float* sum,
                                int64_t s0, void* workspace, int threads, void* stream) {
  if (workspace == nullptr) return 7;
  if (sum) for (int64_t j = 0; j < 5; ++j) sum[j] = 0;
  for (int64_t i = 0; i < s0; ++i)
    for (int64_t j = 0; j < 5; ++j) {
      float v = out[i * 5 + j] > 0 ? tangent[i * 5 + j] : 0;
      if (grad) grad[i * 5 + j] = v;
      if (sum) sum[j] += v;
    }
  return 0;
}
"""
)


def _gemm_forward(saves: bool) -> Plan:
    inputs = {"x": spec(S0, 3), "weight": spec(5, 3), "bias": spec(5)}
    turned = TensorSpec("float32", (Dim(3), Dim(5)), (ONE, Dim(3)))
    add_relu = entry("fw_add_relu", "mm", "bias", "relu")
    steps: list[Step] = [
        view("t", "aten.t.default", Ref("weight"), out=turned),
        aten("mm", "aten.mm.default", Ref("x"), Ref("t"), out=spec(S0, 5)),
        loop(add_relu, ("mm", "bias"), ("relu",), "add relu"),
    ]
    specs = {"t": turned, "mm": spec(S0, 5), "relu": spec(S0, 5)}
    return plan(inputs, steps, ("relu", "x", "t", "relu") if saves else ("relu",), specs)


def _gemm_backward() -> Plan:
    turned = TensorSpec("float32", (Dim(3), Dim(5)), (ONE, Dim(3)))
    back = TensorSpec("float32", (Dim(5), Dim(3)), (Dim(3), ONE))
    inputs = {"x": spec(S0, 3), "t": turned, "relu": spec(S0, 5), "tangents_1": spec(S0, 5)}
    flipped = TensorSpec("float32", (Dim(5), S0), (ONE, Dim(5)))
    made = entry("fw_relu_backward", "tangent", "relu", "grad", "sum", workspace=S0)
    steps: list[Step] = [
        loop(made, ("tangents_1", "relu"), ("where", "sum_1"), "threshold_backward sum"),
        view("t_1", "aten.t.default", Ref("where"), out=flipped),
        aten("mm_1", "aten.mm.default", Ref("t_1"), Ref("x"), out=spec(5, 3)),
        view("t_2", "aten.t.default", Ref("t"), out=back),
        aten("mm_2", "aten.mm.default", Ref("where"), Ref("t_2"), out=spec(S0, 3)),
    ]
    specs = {
        "where": spec(S0, 5),
        "sum_1": spec(5),
        "t_1": flipped,
        "mm_1": spec(5, 3),
        "t_2": back,
        "mm_2": spec(S0, 3),
    }
    return plan(inputs, steps, ("mm_2", "mm_1", "sum_1"), specs)


def gemm_add_relu() -> Case:
    namespace: dict[str, type[nn.Module]] = {}
    exec(GEMM_SOURCE, namespace)
    model = namespace["Model"](3, 5)
    args = (torch.randn(4, 3),)
    plans = (_gemm_forward(True), _gemm_forward(False), _gemm_backward())
    bindings = (
        Binding("input", "0", True),
        Binding("parameter", "gemm.weight", True),
        Binding("parameter", "bias", True),
    )
    results = (Result("output", 0), *(Result("saved", i) for i in range(3)))
    modes = tuple(
        ProgramPlans(program(mode, bindings, results, (0,), plans), *plans)
        for mode in ("train", "eval")
    )
    entries = (
        entry("fw_add_relu", "mm", "bias", "relu"),
        entry("fw_relu_backward", "tangent", "relu", "grad", "sum", workspace=S0),
    )
    source = Source("host", GEMM_KERNELS, entries)
    bundle = ModuleBundle("gemm_add_relu", "host", source, arguments_of(model, args), modes)
    return with_owners(Case(model, args, bundle, GEMM_SOURCE))
