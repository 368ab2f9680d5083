"""Hand-written programs with their plans and host kernels, to test what runs them.

Each case is what the front end would make of a small model, written out so that the run time
and the emitted text are tested on their own.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fusewright.codegen.render import flattened
from fusewright.codegen.source import Entry, Source, Workspace
from fusewright.compile.call_kinds import arguments_of
from fusewright.compile.loading import kernels_of, load
from fusewright.compile.owners import Modes, owners_of
from fusewright.emit.bundle import ModuleBundle, ProgramPlans
from fusewright.ir.graph import (
    ONE,
    ZERO,
    Binding,
    Dim,
    ForwardOutput,
    Graph,
    Input,
    Node,
    Program,
    Ref,
    Symbol,
    TensorSpec,
    contiguous_strides,
)
from fusewright.ir.loop import Argument, LoopKernel
from fusewright.plan.steps import Call, Fused, Plan, Step, View

S0 = Dim(1, ("s0",))
PRELUDE = """#include <cstdint>
#include <cmath>
extern "C" const char* fw_error_text(int code) { return code == 7 ? "seven" : "unknown"; }
"""


_ENTRY = re.compile(r'extern "C" int (\w+)\(')
_CALLED = """
extern "C" _object* NAME_called(_object* self, _object* const* given, std::ptrdiff_t n) {
  return fw::called<NAME>(NAME, "NAME", self, given, n);
}
"""


def with_calls(text: str) -> str:
    """A text of C++ whose entry points are also built-in functions of Python."""
    calls = "".join(_CALLED.replace("NAME", name) for name in _ENTRY.findall(text))
    return text + "\n".join([*flattened("scalar/python.hpp", set()), calls])


def spec(*shape: Dim | int, dtype: str = "float32") -> TensorSpec:
    dims = tuple(each if isinstance(each, Dim) else Dim(each) for each in shape)
    return TensorSpec(dtype, dims, contiguous_strides(dims))


def entry(
    name: str, *arguments: str, symbols: tuple[str, ...] = ("s0",), workspace: Dim = ZERO
) -> Entry:
    return Entry(name, arguments, symbols, Workspace(workspace))


def loop(made: Entry, inputs: tuple[str, ...], outputs: tuple[str, ...], operators: str) -> Fused:
    n_inputs = len(inputs)
    arguments = tuple(
        Argument(name, "float32", index >= n_inputs) for index, name in enumerate(made.arguments)
    )
    kernel = LoopKernel(made.name, operators, (), (), arguments, made.symbols, ())
    return Fused(
        name="custom_" + operators.replace(" ", "_"),
        kernel=kernel,
        inputs=inputs,
        outputs=outputs,
        operators=tuple(operators.split()),
        bytes_moved=1024,
        operations=256,
    )


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
    results: tuple[ForwardOutput, ...],
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
        source = self.bundle.source
        return load(self.bundle, kernels_of(source, lambda _: compiled(source, folder)))


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
  if (workspace == nullptr && s0 != 0) return 7;
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
    results = (ForwardOutput("output", 0), *(ForwardOutput("saved", i) for i in range(3)))
    modes = tuple(
        ProgramPlans(program(mode, bindings, results, (0,), plans), *plans)
        for mode in ("train", "eval")
    )
    entries = (
        entry("fw_add_relu", "mm", "bias", "relu"),
        entry("fw_relu_backward", "tangent", "relu", "grad", "sum", workspace=S0),
    )
    source = Source("host", with_calls(GEMM_KERNELS), entries)
    bundle = ModuleBundle("gemm_add_relu", "host", source, arguments_of(model, args), modes)
    return with_owners(Case(model, args, bundle, GEMM_SOURCE))


MEDLEY_SOURCE = """
import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.factor = 2.0

    def forward(self, x):
        return x * self.weight


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("by-pass", Scale())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x, index, flag=True):
        y = getattr(self, "by-pass")(x)
        self.count += 1
        return {
            "y": y,
            "again": [y, x],
            "rows": x.shape[0],
            "none": None,
            "flat": x.reshape(-1),
            "index": index,
            "twice": index * 2,
            "apart": (y * 2).detach(),
        }


def get_inputs():
    return [torch.randn(4, 3), torch.arange(4)]


def get_init_inputs():
    return []
"""

MEDLEY_KERNELS = (
    PRELUDE
    + """
extern "C" int fw_medley(const float* x, const float* w, const int64_t* index,
                         const int64_t* count, float* y, int64_t* twice, int64_t* counted,
                         float* apart, int64_t s0, void* workspace, int threads, void* stream) {
  for (int64_t i = 0; i < s0 * 3; ++i) {
    y[i] = x[i] * w[i % 3];
    apart[i] = y[i] * 2;
  }
  for (int64_t i = 0; i < s0; ++i) twice[i] = index[i] * 2;
  *counted = *count + 1;
  return 0;
}
extern "C" int fw_medley_backward(const float* ty, const float* ta, const float* tx,
                                  const float* tf, const float* x, const float* w, float* gx,
                                  float* gw, int64_t s0, void* workspace, int threads,
                                  void* stream) {
  if (gw) for (int64_t j = 0; j < 3; ++j) gw[j] = 0;
  for (int64_t i = 0; i < s0 * 3; ++i) {
    float t = ty[i] + ta[i];
    if (gx) gx[i] = t * w[i % 3] + tx[i] + tf[i];
    if (gw) gw[i % 3] += t * x[i];
  }
  return 0;
}
"""
)
_MEDLEY = entry("fw_medley", "x", "w", "index", "count", "y", "twice", "counted", "apart")
_MEDLEY_BACK = entry("fw_medley_backward", "ty", "ta", "tx", "tf", "x", "w", "gx", "gw")
_FLAT = TensorSpec("float32", (Dim(3, ("s0",)),), (ONE,))


def _medley_forward(saves: bool) -> Plan:
    inputs = {
        "x": spec(S0, 3),
        "w": spec(3),
        "count": spec(dtype="int64"),
        "index": spec(S0, dtype="int64"),
    }
    made = ("y", "twice", "counted", "apart")
    steps: list[Step] = [
        loop(_MEDLEY, ("x", "w", "index", "count"), made, "mul add"),
        view("flat", "aten.view.default", Ref("x"), (Dim(-1),), out=_FLAT),
    ]
    specs = {
        "y": spec(S0, 3),
        "twice": spec(S0, dtype="int64"),
        "counted": spec(dtype="int64"),
        "apart": spec(S0, 3),
        "flat": _FLAT,
    }
    outputs: tuple[str | Dim | None, ...]
    outputs = ("counted", "y", "y", "x", S0, "flat", "index", "twice", "apart")
    return plan(inputs, steps, (*outputs, "x", "w") if saves else outputs, specs)


def _medley_backward() -> Plan:
    like = spec(S0, 3)
    inputs = {"x": like, "w": spec(3), "ty": like, "ta": like, "tx": like, "tf": _FLAT}
    steps: list[Step] = [
        loop(_MEDLEY_BACK, ("ty", "ta", "tx", "tf", "x", "w"), ("gx", "gw"), "mul sum")
    ]
    return plan(inputs, steps, ("gx", "gw", None, None), {"gx": like, "gw": spec(3)})


def medley() -> Case:
    """Every kind of output, a buffer that changes, an integer input, a constant, an odd path."""
    namespace: dict[str, type[nn.Module]] = {}
    exec(MEDLEY_SOURCE, namespace)
    model = namespace["Model"]()
    args = (torch.randn(4, 3), torch.arange(4), True)
    plans = (_medley_forward(True), _medley_forward(False), _medley_backward())
    bindings = (
        Binding("input", "0", True),
        Binding("parameter", "by-pass.weight", True),
        Binding("buffer", "count", False),
        Binding("input", "1", False),
    )
    outputs = tuple(ForwardOutput("output", i) for i in range(8))
    results = (
        ForwardOutput("mutation", 2),
        *outputs,
        ForwardOutput("saved", 0),
        ForwardOutput("saved", 1),
    )
    tree = (
        "{'y': o[0], 'again': [o[1], o[2]], 'rows': o[3], 'none': None, 'flat': o[4], "
        "'index': o[5], 'twice': o[6], 'apart': o[7]}"
    )
    modes = tuple(
        ProgramPlans(program(mode, bindings, results, (1, 2, 3, 5), plans, tree), *plans)
        for mode in ("train", "eval")
    )
    source = Source("host", with_calls(MEDLEY_KERNELS), (_MEDLEY, _MEDLEY_BACK))
    bundle = ModuleBundle("medley", "host", source, arguments_of(model, args), modes)
    return with_owners(Case(model, args, bundle, MEDLEY_SOURCE))


class LiteralSum(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        constant = torch.tensor([1.0, 2.0, float("inf")])
        return x + constant, constant


def literal_sum() -> Case:
    """A constant that the model makes from numbers, and no kernel at all."""
    like, args = spec(S0, 3), (torch.randn(4, 3),)
    held = Call(
        Node("c", "literal", ((1.0, 2.0, float("inf")),), (), spec(3)), ("c",), "constant", 0, 0
    )
    added = aten("y", "aten.add.Tensor", Ref("x"), Ref("c"), out=like)
    forward = plan({"x": like}, [held, added], ("y", "c"), {"c": spec(3), "y": like})
    plans = (forward, forward, plan({"t": like}, [], ("t",), {}))
    results = (ForwardOutput("output", 0), ForwardOutput("output", 1))
    made = program("train", (Binding("input", "0", True),), results, (0,), plans, "(o[0], o[1])")
    source = Source("host", PRELUDE, ())
    modes = (ProgramPlans(made, *plans),)
    model = LiteralSum()
    bundle = ModuleBundle("literal_sum", "host", source, arguments_of(model, args), modes)
    return Case(model, args, bundle, "")
