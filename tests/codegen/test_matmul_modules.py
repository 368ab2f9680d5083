"""Modules with matmuls: two programs a mode, the device queries they make, reports, compiling."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusewright.bench.plan_record import plan_graphs, step_times
from fusewright.bench.record import Rates
from fusewright.bench.trace import Trace
from fusewright.compile.call_kinds import arguments_of
from fusewright.compile.loading import kernels_of, load
from fusewright.compile.owners import owners_of
from fusewright.compile.pipeline import Prepared, prepare
from fusewright.emit.bundle import ModuleBundle
from fusewright.emit.file import file_text
from fusewright.emit.text import module_text
from fusewright.ir.graph import TensorSpec
from fusewright.outcome import step_records
from fusewright.plan.show import show
from fusewright.report import print_plans
from fusewright.rewrite import matmuls
from fusewright.runtime import tensor_cores
from fusewright.target.target import Target
from tests.support import nvcc
from tests.support.nvcc import compile_as_emitted


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1032, 1001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


MODEL, X = Model(), torch.randn(1100, 1032)


def on_cuda(value: Any) -> Any:
    """A planned program as if it had been captured on a GPU."""
    if isinstance(value, TensorSpec):
        return replace(value, device="cuda:0")
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: on_cuda(getattr(value, f.name)) for f in fields(value)})
    return tuple(map(on_cuda, value)) if isinstance(value, tuple) else value


def prepared(target: Target) -> Prepared:
    return prepare(MODEL, (X,), device=torch.device("cpu"), target=target)


@pytest.fixture(scope="module")
def bundle() -> ModuleBundle:
    made = prepared(Target.cuda())
    modes = tuple(
        replace(on_cuda(each), owners=owners_of(MODEL, each.program.mode)) for each in made.modes
    )
    return ModuleBundle("layer", "cuda", made.source, arguments_of(MODEL, (X,)), modes)


def test_each_mode_has_a_program_with_matmuls(bundle: ModuleBundle) -> None:
    made = module_text(bundle)
    text = f"{made.drivers}{made.tables}"
    records = re.findall(r'name="layer_\w{16}_(\w+)",\s+training=(\w+),', text)
    assert records == [("train", "True"), ("eval", "False")]
    functions = {
        node.name: ast.unparse(node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }
    assert "_fw_tensor_cores(tensors[0].device.index)" in functions["_model_misfit"]
    assert "aten" not in functions["_forward"] + functions["_backward"]
    assert "_fw_terms()" in functions["custom_mm_add_relu_le"]
    assert "_fw_terms()" not in functions["custom_split"]


def test_rows_of_odd_length_are_padded_to_16_bytes(bundle: ModuleBundle) -> None:
    text = module_text(bundle).tables
    assert "= _fw_memory((s0, 1001), (1008, 1), torch.float16, device)" in text


def test_a_target_without_tensor_cores_has_one_program_a_mode() -> None:
    made = prepared(Target.cuda(tensor_cores=False))
    assert [each.name for each in made.modes] == ["train", "eval"]
    assert "sm90" not in made.source.text and not any(e.terms for e in made.source.entries)
    assert [each.name for each in prepared(Target.host()).modes] == ["train", "eval"]


def test_the_file_queries_the_device_only_if_it_has_matmuls(bundle: ModuleBundle) -> None:
    source = "import torch\nclass Model(torch.nn.Module):\n    ...\n"
    text = file_text(bundle, source, "made for a test")
    compile(text, "model_new.py", "exec")
    assert text.count("def _fw_tensor_cores") == text.count("def _fw_terms") == 1
    assert not re.search(r"\btry\b|\bexcept\b|pass|torch\.cuda\.[Ss]tream\(", text)
    made = prepared(Target.cuda(tensor_cores=False))
    plain = replace(bundle, source=made.source, modes=made.modes)
    assert "_fw_terms" not in file_text(plain, source, "made for a test")


def test_a_file_runs_its_program_at_every_batch_but_an_empty_one(bundle: ModuleBundle) -> None:
    """A module makes other programs for small batches; a file cannot."""
    source = "import torch\nclass Model(torch.nn.Module):\n    ...\n"
    least = {each.worth[1] for each in bundle.modes if each.worth}
    assert least and min(least) > 1
    found = [module_text(bundle).tables, file_text(bundle, source, "made for a test")]
    rules = [re.findall(r"not \(s0 >= (\d+)\)", text) for text in found]
    assert {int(each) for each in rules[0]} == least and rules[1] == ["1"]


def test_another_device_is_refused(bundle: ModuleBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = load(bundle, kernels_of(bundle.source, MagicMock()))
    assert [mode.training for mode in modes] == [True, False]
    with FakeTensorMode():
        tensors = [
            torch.empty(shape, device="cuda") for shape in ((1001, 1032), (1001,), (1100, 1032))
        ]
    for here in (False, True):
        monkeypatch.setattr(tensor_cores, "_FW_CORES", {0: here})
        monkeypatch.setitem(modes[0].misfit.__globals__, "_fw_tensor_cores", lambda _, h=here: h)
        reason = str(modes[0].misfit(*tensors))
        assert ("capability 9.0" in reason) is not here
        assert ("FakeTensor" in reason) is here, "it goes on to the tensors themselves"


def test_the_capability_is_queried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = MagicMock(side_effect=lambda index: MagicMock(major=9 - index, minor=0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", asked)
    monkeypatch.setattr(tensor_cores, "_FW_CORES", {})
    found = [tensor_cores._fw_tensor_cores(index) for index in (0, 1, 0, 1)]
    assert found == [True, False, True, False] and asked.call_count == 2


@pytest.fixture
def precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "none"
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.filterwarnings("ignore")
def test_terms_follow_every_way_of_allowing_tf32(precision: None) -> None:
    assert tensor_cores._fw_terms() == 3
    for name, terms in (("high", 1), ("medium", 1), ("highest", 3)):
        torch.set_float32_matmul_precision(name)
        assert tensor_cores._fw_terms() == terms
    for allowed in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        assert tensor_cores._fw_terms() == (1 if allowed else 3)
    for name, terms in (("tf32", 1), ("ieee", 3), ("tf32", 1)):
        torch.backends.cuda.matmul.fp32_precision = name
        assert tensor_cores._fw_terms() == terms
    with pytest.raises(RuntimeError):
        print(torch.backends.cuda.matmul.allow_tf32)  # old and new ways, mixed


def convolution_terms(which: str = "forward", transposed: bool = False, groups: int = 1) -> int:
    """For a convolution of these sizes on the CPU."""
    numbers = ((2, 1), (1, 0), (1, 1), transposed, (0, 0), groups)
    images, weights = torch.empty(2, 4, 9, 10), torch.empty(4, 4 // groups, 3, 2)
    sizes = (images.shape, images.stride(), weights.shape, weights.stride())
    asked = tensor_cores._FwPass(which, *sizes, numbers, torch.device("cpu"))
    return tensor_cores._fw_convolution_terms(asked)


def test_convolutions_have_a_flag_of_their_own(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert convolution_terms() == 1
    for allowed in (False, True):
        torch.backends.cudnn.allow_tf32 = allowed
        assert convolution_terms() == (1 if allowed else 3)
    monkeypatch.setattr(tensor_cores, "_fw_precision", None)
    assert convolution_terms() == 1
    with torch.backends.cudnn.flags(enabled=False):
        assert convolution_terms() == 3
    assert asked == ["forward"], "asked once"


def test_nothing_is_queried_during_a_graph_capture(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert convolution_terms() == 3 and not asked
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert convolution_terms() == 1 and asked


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("which", ["forward", "input", "weight"])
@pytest.mark.parametrize("rounds", [False, True])
def test_a_convolution_is_as_precise_as_pytorchs(
    which: str, transposed: bool, groups: int, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = torch.ops.aten.convolution, torch.ops.aten.convolution_backward

    def rounded(*args: object) -> object:
        """All passes round except `which`, or only `which` rounds."""
        wanted = args[-1]
        passes = ["forward"]
        if isinstance(wanted, list):
            passes = [name for name, on in zip(("input", "weight"), wanted[:2], strict=True) if on]
        if (passes == [which]) == rounds:
            args = tuple(
                to_tf32(each) if isinstance(each, torch.Tensor) and not each.is_meta else each
                for each in args
            )
        return backward(*args) if isinstance(wanted, list) else forward(*args)

    monkeypatch.setattr(torch.ops.aten, "convolution", rounded)
    monkeypatch.setattr(torch.ops.aten, "convolution_backward", rounded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tensor_cores, "_FW_ROUNDS", {})
    monkeypatch.setattr(tensor_cores, "_fw_room", lambda _: 1 << 30)
    assert convolution_terms(which, transposed, groups) == (1 if rounds else 3)
    monkeypatch.setattr(tensor_cores, "_FW_ROUNDS", {})
    monkeypatch.setattr(tensor_cores, "_fw_room", lambda _: 1 << 10)
    assert convolution_terms(which, transposed, groups) == 3, "no room to ask"


def test_older_pytorch_is_queried_through_its_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cores, "_fw_precision", None)
    assert tensor_cores._fw_terms() == 3


def test_reports_show_what_runs_here() -> None:
    made = prepared(Target.cuda())
    kinds = [(each["mode"], each["graph"], each["kind"]) for each in step_records(made.modes)]
    assert kinds.count(("train", "backward", "matmul")) == 2
    assert not any(kind == "call" for _, _, kind in kinds), "the plain programs are not shown"
    console = Console(record=True, width=200)
    print_plans(console, made.modes)
    assert "mm → add → relu" in console.export_text()
    assert "custom_mm_add_relu: mm → add → relu" in show(made.modes[0])
    graphs = plan_graphs(made.modes)
    assert [each.mode for each in graphs] == ["train"] * 3 + ["eval"] * 3
    assert {step.kind for graph in graphs for step in graph.steps} == {"loop", "matmul"}


def test_a_matmul_is_compared_with_the_fp16_rate() -> None:
    plans = prepared(Target.cuda()).modes[0]
    rates = Rates(1e18, {"fp32": 1e12, "tf32": 5e12, "fp16": 9e12})
    trace = Trace(1, (), {}, None)
    for precision, rate in (("fp32", 3e12), ("tf32", 9e12)):
        rows = step_times(plans, "forward", trace, rates, precision)
        (row,) = [each for each in rows if each.kind == "matmul"]
        assert row.roof_us == pytest.approx(row.operations / rate * 1e6)


@pytest.mark.sample(2)
@nvcc.needed
@pytest.mark.parametrize("terms", [1, 3])
def test_the_source_compiles_for_both_architectures(
    bundle: ModuleBundle, terms: int, tmp_path: Path
) -> None:
    compile_as_emitted(bundle.source, tmp_path, terms)


@pytest.mark.sample(3)
@nvcc.needed
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matmuls_in_16_bits_compile_for_both_architectures(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmuls, "is_worthwhile", lambda *_: True)
    model, x = copy.deepcopy(MODEL).to(dtype), X.to(dtype)
    target = Target.cuda(trials=("half_matmuls",))
    made = prepare(model, (x,), modes=("train",), device=torch.device("cpu"), target=target)
    assert "fw::half_matmul<" in made.source.text
    compile_as_emitted(made.source, tmp_path)
