"""The reference problems in their CUDA form: they compile for both architectures, by the rules."""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fusewright.codegen.render import render
from fusewright.compile.module import arguments_of, owners_of
from fusewright.compile.pipeline import prepare
from fusewright.emit.bundle import ModuleBundle
from fusewright.emit.file import file_text
from fusewright.ir.graph import Dim
from fusewright.problem.load import load_problem
from fusewright.rewrite import matmuls as products
from fusewright.schedule.loops import choose
from fusewright.target.target import Target
from tests.support import loop_cases as cases
from tests.support import nvcc

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
KERNELS = ROOT / "fusewright" / "kernels"


@functools.cache
def cuda_bundle(path: Path) -> tuple[ModuleBundle, str]:
    """What a GPU machine would emit; captured here on the CPU, which changes no kernel's text."""
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
def test_rows_of_halves_compile(tmp_path: Path) -> None:
    """Long ones wait in shared memory, and their maxima are found two at a time."""
    rows = Dim(1, ("s0",))
    loops = [
        cases.softmax(rows, 49152, "float16"),
        cases.layer_norm(rows, 32768, "bfloat16"),
        cases.extremes(rows, 4096, "bfloat16"),
    ]
    picked = [(loop, choose(loop, Target.cuda(), {"s0": 4096})) for loop in loops]
    assert [schedule.shared for _, schedule in picked] == [2, 3, 0]
    text = render(picked, Target.cuda()).text
    assert text.count("fw::add_halves(acc.") == 3
    assert "row<int, 8, 512, 1, 12, true, 0, 2>" in text
    assert "row<int64_t, 1, 512, 1, 12, false, 0, 0>" in text, "by single elements, read again"
    compiles(text, tmp_path)


@nvcc.needed
def test_scans_compile(tmp_path: Path) -> None:
    rows = Dim(1, ("s0",))
    loops = [
        replace(cases.row_scan(rows, 8192), name="rows"),
        replace(cases.row_scan(rows, 8192, "bfloat16", backward=True), name="halves"),
        replace(cases.row_scan(rows, 100, "int64"), name="short_rows"),
        replace(cases.column_scan(rows, 2048, 512), name="columns"),
        replace(cases.column_scan(rows, 65536, 16, "float64"), name="few_columns"),
    ]
    picked = [(loop, choose(loop, Target.cuda(), {"s0": 16})) for loop in loops]
    assert [x.kind for _, x in picked] == ["scan"] * 3 + ["scan_column"] * 2
    assert picked[-1][1].splits > 1
    compiles(render(picked, Target.cuda()).text, tmp_path, of="scan")


@pytest.mark.sample(0)
@nvcc.needed
def test_logsumexps_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In loops, and at the end of products by rows and by columns."""
    monkeypatch.setattr(products, "is_worthwhile", lambda *_: True)
    model = Powers().requires_grad_(False)
    x = torch.randn(4096, 256)
    target = Target.cuda(trials=("sweeping",))
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
    """Kernels for tensor cores, of sizes that are ours, each with an epilogue, and held columns."""

    def __init__(self) -> None:
        super().__init__()
        norm = functools.partial(nn.BatchNorm2d, 64)
        self.window = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), norm(), nn.ReLU())
        self.planes = nn.Sequential(nn.Conv2d(64, 64, 3, groups=64), norm(), nn.SiLU())
        self.product = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.ReLU())

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        return self.window(x) + x, self.planes(x), self.product(rows), x.softmax(1)


@pytest.mark.sample(2)
@nvcc.needed
def test_large_kernels_are_accepted(tmp_path: Path) -> None:
    """By both of nvcc's halves; g++ runs them elsewhere, and does not know whose functions are."""
    inputs = (torch.randn(1, 64, 224, 224), torch.randn(1024, 1024))
    device, target = torch.device("cpu"), Target.cuda()
    text = prepare(Ended(), inputs, device=device, target=target).source.text
    for kernel in ("ByLines<", "plane_convolution<", "product<", "held_column<"):
        assert kernel in text
    nvcc.read(text, tmp_path)


def compiles(text: str, folder: Path, of: str = "", archs: tuple[str, ...] = nvcc.BOTH) -> None:
    """Without spills in kernels of that name, and with nothing that other modules would share."""
    spilled = nvcc.compiled(text, folder, "-O1", "-Xptxas", "-v", archs=archs)
    spilled = [each for each in spilled if of in each[1]]
    assert {arch for arch, _, _ in spilled} == {f"sm_{arch}" for arch in archs}
    for _, kernel, spills in spilled:
        # A convolution's sums are most of the registers there are: a little may go to memory.
        full = "window_kernel" in kernel or "gradient_kernel" in kernel
        assert spills <= (64 if full else 0), kernel
    command = ["nm", str(folder / "kernels.o")]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True)
    shared = [line for line in symbols.stdout.splitlines() if " u " in line]
    assert not shared, "the linker would keep one of these for all modules of a process"


FORBIDDEN = r"\b(try|except)\b|pass"


def test_no_kernel_has_a_word_that_public_checkers_forbid() -> None:
    """Those of the examples are seen below; other models' files carry the others."""
    files = [each for each in KERNELS.rglob("*") if each.is_file()]
    found = {each.name for each in files if re.search(FORBIDDEN, each.read_text())}
    assert len(files) > 40 and not found


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
    assert "load_inline" in text and "__global__" in text and "class ModelNew(Model)" in text
    assert not re.search(FORBIDDEN, text)
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
    r"const auto kernel = (\w+)[^;]*;(?:(?!const auto kernel)[^}])*?launch_behind\(kernel"
)


def test_what_is_launched_behind_another_waits_for_it() -> None:
    """And nothing else is: a kernel that does not wait would read what is not there yet."""
    text = "".join(path.read_text() for path in sorted(KERNELS.rglob("*.cuh")))
    bodies = dict(KERNEL.findall(text))
    behind = {*BEHIND.findall(text), *re.findall(r"launch_behind\((?!kernel\b)(\w+),", text)}
    assert behind >= {"window_kernel", "line_window_kernel", "lay_out_lines", "product_kernel"}
    waiting = {name for name, body in bodies.items() if "await_kernel_before();" in body}
    assert behind == waiting
    assert "split_filter" not in behind  # what comes after it reads the input before it waits
