"""The reference problems in CUDA: they compile for both architectures and keep the rules."""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import loop_kernels
from fusewright.compile.call_kinds import arguments_of
from fusewright.compile.owners import owners_of
from fusewright.compile.pipeline import prepare
from fusewright.emit.bundle import ModuleBundle
from fusewright.emit.file import file_text
from fusewright.ir.graph import Dim
from fusewright.kinds.registry import render
from fusewright.problem.load import load_problem
from fusewright.rewrite import matmuls
from fusewright.schedule.loops import choose
from fusewright.target.target import Target
from tests.support import nvcc
from tests.support.emitted_files import FORBIDDEN_WORDS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
KERNELS = ROOT / "fusewright" / "kernels"


@functools.cache
def cuda_bundle(path: Path) -> tuple[ModuleBundle, str]:
    """What a machine with a GPU would emit. Capture on the CPU gives the same kernels."""
    problem = load_problem(path)
    model, args = problem.make_model(), problem.make_inputs()
    prepared = prepare(model, args, device=torch.device("cpu"), target=Target.cuda())
    modes = tuple(
        replace(each, owners=owners_of(model, each.program.mode)) for each in prepared.modes
    )
    arguments = arguments_of(model, args)
    return ModuleBundle(problem.name, "cuda", prepared.source, arguments, modes), problem.source


@nvcc.needed
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_kernel_compiles(path: Path, tmp_path: Path) -> None:
    bundle, _ = cuda_bundle(path)
    compiles(bundle.source.text, tmp_path)


@pytest.mark.sample(0)
@nvcc.needed
def test_rows_in_16_bits_compile(tmp_path: Path) -> None:
    """Long rows are held in shared memory, and their maxima are found two at a time."""
    rows = Dim(1, ("s0",))
    loops = [
        loop_kernels.softmax(rows, 49152, "float16"),
        loop_kernels.layer_norm(rows, 32768, "bfloat16"),
        loop_kernels.extremes(rows, 4096, "bfloat16"),
    ]
    picked = [(loop, choose(loop, Target.cuda(), {"s0": 4096})) for loop in loops]
    assert [schedule.shared for _, schedule in picked] == [2, 3, 0]
    text = render(picked, Target.cuda()).text
    assert text.count("fw::add_half_pairs(fw::nth<") == 3
    assert "row<int, 8, 512, 1, 12, true, 0, 2>" in text
    assert "row<int64_t, 1, 512, 1, 12, false, 0, 0>" in text, "by single elements, read again"
    compiles(text, tmp_path)


@nvcc.needed
def test_scans_compile(tmp_path: Path) -> None:
    rows = Dim(1, ("s0",))
    loops = [
        replace(loop_kernels.row_scan(rows, 8192), name="rows"),
        replace(loop_kernels.row_scan(rows, 8192, "bfloat16", backward=True), name="halves"),
        replace(loop_kernels.row_scan(rows, 100, "int64"), name="short_rows"),
        replace(loop_kernels.column_scan(rows, 2048, 512), name="columns"),
        replace(loop_kernels.column_scan(rows, 65536, 16, "float64"), name="few_columns"),
    ]
    picked = [(loop, choose(loop, Target.cuda(), {"s0": 16})) for loop in loops]
    assert [x.kind for _, x in picked] == ["scan"] * 3 + ["scan_column"] * 2
    assert picked[-1][1].splits > 1
    compiles(render(picked, Target.cuda()).text, tmp_path, of="scan")


@pytest.mark.sample(0)
@nvcc.needed
def test_logsumexps_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In loops, and in the epilogues of matmuls, by rows and by columns."""
    monkeypatch.setattr(matmuls, "is_worthwhile", lambda *_: True)
    model = Powers().requires_grad_(False)
    x = torch.randn(4096, 256)
    target = Target.cuda(trials=("fused_reductions",))
    found = prepare(model, (x,), modes=("eval",), device=x.device, target=target)
    text = found.source.text
    assert {"ByRow", "ByColumn"} <= set(re.findall(r"fw::(By\w+)<custom_mm\w*logsumexp", text))
    compiles(text, tmp_path, of="logsumexp", archs=("90a",))


class Powers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = torch.nn.Linear(256, 512), torch.nn.Linear(256, 384)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = torch.nn.functional.gelu(self.rows(x)).logsumexp(-1)
        return wide, self.columns(x).logsumexp(0), x.logsumexp(0), x.logsumexp((0, 1))


class Ended(nn.Module):
    """Tensor-core kernels at sizes where they are used, each with an epilogue, and held columns."""

    def __init__(self) -> None:
        super().__init__()
        norm = functools.partial(nn.BatchNorm2d, 64)
        self.convolution = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), norm(), nn.ReLU())
        self.planes = nn.Sequential(nn.Conv2d(64, 64, 3, groups=64), norm(), nn.SiLU())
        self.matmul = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.ReLU())

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        return self.convolution(x) + x, self.planes(x), self.matmul(rows), x.softmax(1)


@pytest.mark.sample(2)
@nvcc.needed
def test_nvcc_accepts_large_kernels(tmp_path: Path) -> None:
    """Both its host and its device pass do. g++, which runs them elsewhere, ignores where a
    function may be called."""
    inputs = (torch.randn(1, 64, 224, 224), torch.randn(1024, 1024))
    device, target = torch.device("cpu"), Target.cuda()
    text = prepare(Ended(), inputs, device=device, target=target).source.text
    for kernel in ("ByStagedInput<", "depthwise_convolution<", "fp16x3_matmul<", "held_column<"):
        assert kernel in text
    nvcc.read(text, tmp_path)


def compiles(text: str, folder: Path, of: str = "", archs: tuple[str, ...] = nvcc.BOTH) -> None:
    """Compile: kernels of that name spill nothing, and no symbol is shared with other modules."""
    spilled = nvcc.compiled(text, folder, "-O1", "-Xptxas", "-v", archs=archs)
    spilled = [each for each in spilled if of in each[1]]
    assert {arch for arch, _, _ in spilled} == {f"sm_{arch}" for arch in archs}
    for _, kernel, spills in spilled:
        # A convolution's sums fill most registers: a few may spill.
        full = "convolution_kernel" in kernel or "gradient_kernel" in kernel
        assert spills <= (64 if full else 0), kernel
    command = ["nm", str(folder / "kernels.o")]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True)
    shared = [line for line in symbols.stdout.splitlines() if " u " in line]
    assert not shared, "the linker would keep one of these for all modules of a process"


def test_kernels_contain_no_refused_word_outside_comments() -> None:
    """Emission changes comments alone. The test below reads the examples' kernels only."""
    files = [each for each in KERNELS.rglob("*") if each.is_file()]
    code = {each.name: re.sub(r"//[^\n]*", "", each.read_text()) for each in files}
    assert len(files) > 40
    assert not {name for name, text in code.items() if re.search(FORBIDDEN_WORDS, text)}


# What a user may write beside the model.
WORDY = """
def unused(flag=None):  # a pass that nobody should try
    "The backward pass, except in words."
    if flag:
        pass
    return "try the pass"
"""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_emitted_text_keeps_the_rules_of_public_checkers(path: Path) -> None:
    bundle, source = cuda_bundle(path)
    source = f"'''One forward pass, except that we try it twice.'''\n{source}\n{WORDY}"
    text = file_text(bundle, source, "made for a test")
    compile(text, "model_new.py", "exec")
    assert "cpp_extension" in text and "__global__" in text and "class ModelNew(Model)" in text
    assert not re.search(FORBIDDEN_WORDS, text)
    assert not re.search(r"threading|multiprocessing|concurrent|torch\.cuda\.[sS]tream\(", text)
    imported = set(re.findall(r"^(?:import|from) ([a-z_]+)", text, re.MULTILINE))
    standard = {"torch", "__future__"} | set(__import__("sys").stdlib_module_names)
    assert imported <= standard
    again, _ = cuda_bundle.__wrapped__(path)
    assert file_text(again, source, "made for a test") == text, "the text is not repeatable"


KERNEL = re.compile(
    r"^(?:__global__.*?)\b(\w+)\((?:const|float\*) [^{]*\{\n(.*?)^\}", re.DOTALL | re.MULTILINE
)
BEHIND = re.compile(
    r"const auto kernel =\s+(\w+)[^;]*;(?:(?!const auto kernel)[^}])*?launch_behind\(kernel"
)


def test_a_kernel_launched_early_waits_for_the_one_before() -> None:
    """No other kernel is launched early: without the wait it would read unfinished results."""
    text = "".join(path.read_text() for path in sorted(KERNELS.rglob("*.cuh")))
    bodies = dict(KERNEL.findall(text))
    behind = {*BEHIND.findall(text), *re.findall(r"launch_behind\((?!kernel\b)(\w+),", text)}
    assert behind >= {
        "convolution_kernel",
        "staged_convolution_kernel",
        "lay_out_staged",
        "matmul_kernel",
    }
    waiting = {name for name, body in bodies.items() if "await_kernel_before();" in body}
    assert behind == waiting
    assert "split_filter" not in behind  # the kernel after it reads the input before it waits
