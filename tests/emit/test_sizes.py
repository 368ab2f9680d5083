"""How long emitted files are: limits that were reached, for a GPU that plans with our matmuls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fusewright.compile.call_kinds import arguments_of
from fusewright.compile.owners import owners_of
from fusewright.compile.pipeline import prepare
from fusewright.emit.bundle import ModuleBundle
from fusewright.emit.file import file_text
from fusewright.problem.load import load_problem
from fusewright.target.target import Target

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
USER = "class Model:\n    ...\n"


def text_of(model: nn.Module, args: tuple[object, ...], source: str) -> str:
    made = prepare(model, args, device=torch.device("cpu"), target=Target.cuda())
    modes = tuple(
        replace(m, owners=owners_of(model, m.program.mode, m.program.changed)) for m in made.modes
    )
    bundle = ModuleBundle("model", "cuda", made.source, arguments_of(model, args), modes)
    return file_text(bundle, source, "Made for a test.")


@pytest.mark.parametrize(
    ("name", "most_kb", "most_lines"),  # the lines are those above the support code
    [
        ("gemm_add_relu", 179, 155),
        ("matmul_min_subtract", 181, 168),
        ("conv2d_min_add_multiply", 257, 175),
        ("matmul_batchnorm_bias_divide_swish", 215, 350),
    ],
)
def test_files_of_the_reference_problems(
    name: str, most_kb: int, most_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = EXAMPLES / f"{name}.py"
    with monkeypatch.context() as full_sizes:
        full_sizes.setattr(torch.cuda, "is_available", lambda: True)
        problem = load_problem(path)
        model, args = problem.make_model(), problem.make_inputs()
    text = text_of(model, args, path.read_text())
    assert "_fw_terms" in text or "_fw_convolution_terms" in text
    assert len(text) < 1000 * most_kb
    own = text.partition("# ---- support code")[0]
    assert own.count("\n") <= most_lines


@pytest.mark.parametrize(
    ("make", "shape", "most_kb"),
    [(nn.ReLU, (4096, 4096), 50), (lambda: nn.LayerNorm(1024), (4096, 1024), 83)],
)
def test_files_of_one_operator(
    make: Callable[[], nn.Module], shape: tuple[int, ...], most_kb: int
) -> None:
    assert len(text_of(make(), (torch.randn(shape),), USER)) < 1000 * most_kb
