"""An emitted file is for readers: in their order, formatted, without what a model does not use."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fusewright.compile.call_kinds import arguments_of
from fusewright.compile.owners import owners_of
from fusewright.compile.pipeline import prepare
from fusewright.emit.bundle import ModuleBundle
from fusewright.emit.file import file_text, split_texts
from fusewright.emit.wrap import COLUMNS
from fusewright.target.target import Target
from tests.support.emitted_files import executed
from tests.support.tensors import assert_same

USER = '''"""A model."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)
'''


class Of(nn.Module):
    """A model of one function."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def network(blocks: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "relu": (lambda: executed(USER)["Model"](), (64, 512)),
    "softmax": (lambda: Of(lambda x: x.softmax(1)), (64, 512)),
    "layer_norm": (lambda: nn.LayerNorm(512), (64, 512)),
    "matmul": (lambda: nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()), (2048, 1024)),
    "network": (lambda: network(3), (4, 16, 32, 32)),
}
TARGETS = {"cuda": Target.cuda, "host": Target.host}


def bundle(name: str, language: str) -> ModuleBundle:
    make, shape = MODELS[name]
    model, args, target = make(), (torch.randn(shape),), TARGETS[language]()
    prepared = prepare(model, args, device=torch.device("cpu"), target=target)
    modes = tuple(replace(m, owners=owners_of(model, m.program.mode)) for m in prepared.modes)
    return ModuleBundle(name, language, prepared.source, arguments_of(model, args), modes)


@pytest.mark.parametrize("language", ["cuda", "host"])
@pytest.mark.parametrize("name", MODELS)
def test_the_file_is_in_reading_order_and_formatted(name: str, language: str) -> None:
    text = file_text(bundle(name, language), USER, f"{name}.\n\nMade for a test.", keep_words=True)
    order = [
        f'"""{name}.',
        '"""A model."""',
        "class Model(nn.Module):",
        "# ---- the fused kernels",
        "_FW_KERNELS = ",
        "def _forward",
        "class ModelNew(Model):",
        "# ---- support code",
        "_FW_DRIVERS = ",
        "class _FwKernels",
        "def custom_",
        "_FW_MODES = ",
    ]
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    command = [sys.executable, "-m", "ruff", "format", "--line-length", str(COLUMNS), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert done.stdout == text


@pytest.mark.parametrize("language", ["cuda", "host"])
def test_only_what_the_model_uses_is_pasted(language: str) -> None:
    text = file_text(bundle("relu", language), USER, "relu")
    defined = re.findall(r"^(?:def|class) (\w+)|^(_\w+) = ", text, re.MULTILINE)
    for name in (one or other for one, other in defined):
        if name not in ("Model", "ModelNew"):
            assert len(re.findall(rf"\b{name}\b", text)) > 1, f"nothing uses {name}"
    for name in ("_fw_recurrent", "_FwPreciseKernels", "_FwStates", "_fw_here"):
        assert name not in text


@pytest.mark.filterwarnings("error")
def test_the_support_code_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    made = bundle("relu", "host")
    model, support = split_texts(made, USER, "relu", "relu_support.py")
    (tmp_path / "relu_new.py").write_text(model)
    (tmp_path / "relu_support.py").write_text(support)
    names = {"__file__": str(tmp_path / "relu_new.py"), "__name__": "relu_new"}
    exec(compile(model, names["__file__"], "exec"), names)
    x = torch.randn(8, 512, requires_grad=True)
    whole = executed(file_text(made, USER, "relu"))
    fast, also = names["ModelNew"](), whole["ModelNew"]()  # type: ignore[operator]
    assert_same(fast(x), also(x))
    assert_same(fast(x), torch.relu(x))
    fast(x).sum().backward()
    assert_same(x.grad, (x > 0).float())
    assert len(model) < len(support)


@pytest.mark.parametrize("language", ["cuda", "host"])
def test_loading_imports_no_build_tools(language: str, tmp_path: Path) -> None:
    path = tmp_path / "model_new.py"
    path.write_text(file_text(bundle("relu", language), USER, "relu"))
    code = f"import torch, sys; before = set(sys.modules); sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "import model_new; slow = {'torch.utils.cpp_extension', 'setuptools', 'numpy'}\n"
    code += "assert not slow & (set(sys.modules) - before)\n"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_drivers_of_a_network_grow_with_it() -> None:
    short, long = (_drivers(blocks) for blocks in (3, 12))
    assert long < 4.6 * short, "more than four times the blocks take"


def _drivers(blocks: int) -> int:
    model, args = network(blocks), (torch.randn(4, 16, 32, 32),)
    prepared = prepare(model, args, device=torch.device("cpu"), target=Target.host())
    modes = tuple(replace(m, owners=owners_of(model, m.program.mode)) for m in prepared.modes)
    made = ModuleBundle("net", "host", prepared.source, arguments_of(model, args), modes)
    text = file_text(made, USER, "net")
    start, end = text.index("def _forward"), text.index("class ModelNew")
    return end - start
