"""Precisions: what PyTorch's flags ask for is built first, another when it is asked for."""

from __future__ import annotations

import copy
import ctypes
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import cpp_extension

from fusewright.codegen import convolution as convolution_text
from fusewright.codegen import matmul as matmul_text
from fusewright.codegen import weight_gradient as gradient
from fusewright.codegen.source import Source
from fusewright.compile.call_kinds import arguments_of
from fusewright.compile.loading import kernels_of, load
from fusewright.compile.module import optimized
from fusewright.compile.owners import owners_of
from fusewright.compile.pipeline import Prepared, prepare
from fusewright.emit.bundle import ModuleBundle
from fusewright.emit.file import file_text
from fusewright.rewrite import matmuls
from fusewright.runtime import cuda, library, tensor_cores
from fusewright.target.target import Target
from tests.support import loop_runs
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import use_tensor_cores
from tests.support.precompiled import gxx
from tests.support.stubs import CONVOLUTION_STUB, MATMUL_STUB

MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv1d(16, 24, 3)
        self.linear = torch.nn.Linear(40, 32)

    def forward(self, x):
        return torch.relu(self.linear(torch.tanh(self.convolution(x))))
"""
X = torch.randn(3, 16, 42, generator=torch.Generator().manual_seed(0))
MACROS = re.compile(r"^#define (FW_[A-Z]+) (\d)$", re.MULTILINE)


@pytest.fixture
def flags(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small matmuls and convolutions too, on the CPU, with PyTorch's default flags."""
    monkeypatch.setattr(matmuls, "is_worthwhile", lambda *_: True)
    use_tensor_cores(monkeypatch)
    monkeypatch.setattr(matmul_text, "SPLIT_HEADER", str(MATMUL_STUB))
    monkeypatch.setattr(convolution_text, "HEADER", str(CONVOLUTION_STUB))
    monkeypatch.setattr(gradient, "HEADER", str(CONVOLUTION_STUB))
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True


def made() -> nn.Module:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(MODEL, names)
    model: nn.Module = names["Model"]()
    return model


def prepared(model: nn.Module) -> Prepared:
    target = Target.cuda()
    return prepare(model, (X,), modes=("train",), device=X.device, target=target)


def bundle_of(model: nn.Module) -> ModuleBundle:
    """The program with matmuls over a source that g++ builds."""
    ready = prepared(model)
    modes = tuple(replace(each, owners=owners_of(model, "train")) for each in ready.modes[:1])
    source = emulated(ready.source)
    return ModuleBundle("both", "host", source, arguments_of(model, (X,)), modes)


class Recorded:
    """Loads libraries and remembers the macros of each."""

    def __init__(self, source: Source) -> None:
        self.source, self.built = source, list[dict[str, str]]()

    def __call__(self, text: str) -> ctypes.CDLL:
        assert text.endswith(self.source.text)
        macros = dict(MACROS.findall(text.removesuffix(self.source.text)))
        assert macros.pop("FW_RARE") == "0", "no call here needs more"
        self.built.append(macros)
        return loop_runs.compile_source(replace(self.source, text=text), loop_runs.EMULATED)


def error(found: Tensor, model: nn.Module) -> float:
    truth = copy.deepcopy(model).double()(X.double()).detach()
    return float((found.detach().double() - truth).norm() / truth.norm())


def test_a_flag_is_honoured_at_once_and_builds_what_it_concerns(flags: None) -> None:
    model = made()
    bundle = bundle_of(model)
    recorded = Recorded(bundle.source)
    fast = optimized(copy.deepcopy(model), load(bundle, kernels_of(bundle.source, recorded)))
    assert recorded.built == [], "nothing is built before it is used"
    assert error(fast(X), model) < 1e-6
    first = {"FW_OTHERS": "1", "FW_CONVOLUTIONS": "1", "FW_MATMULS": "3"}
    assert recorded.built == [first]

    torch.backends.cuda.matmul.allow_tf32 = True
    assert 1e-5 < error(fast(X), model) < 1e-3
    more = {"FW_OTHERS": "0", "FW_CONVOLUTIONS": "0", "FW_MATMULS": "1"}
    assert recorded.built == [first, more]

    torch.backends.cudnn.allow_tf32 = False
    fast(X).sum().backward()
    assert recorded.built[2:] == [{"FW_OTHERS": "0", "FW_CONVOLUTIONS": "3", "FW_MATMULS": "0"}]
    for allowed in (False, True, False):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        assert (error(fast(X), model) < 1e-6) is not allowed
    assert len(recorded.built) == 3, "each precision is built once"


def test_the_first_library_has_what_the_flags_ask_for_then(flags: None) -> None:
    bundle = bundle_of(made())
    recorded = Recorded(bundle.source)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = True, False
    kernels_of(bundle.source, recorded).build()
    assert recorded.built == [{"FW_OTHERS": "1", "FW_CONVOLUTIONS": "3", "FW_MATMULS": "1"}]


def test_an_emitted_file_follows_the_flags(
    flags: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", shlex.join([*gxx(), "-w"]))
    model = made()
    names: dict[str, Any] = {}
    text = file_text(bundle_of(model), MODEL, "made for a test")
    # Fibers switch stacks, which breaks under more optimization than this.
    exec(text.replace("-std=c++17 -O3", "-std=c++17 -O1"), names)
    names["_FW_CORES"][None], names["_fw_rounds"] = True, lambda *_: True
    fast = names["ModelNew"]()
    fast.load_state_dict(model.state_dict())
    counts = []
    for allowed in (False, True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        assert (error(fast(X), model) < 1e-6) is not allowed
        counts.append(len(list(tmp_path.glob("emitted-*.so"))))
    assert counts == [1, 2, 2]


def test_kernels_that_no_flag_concerns_are_built_once(flags: None) -> None:
    model = made()
    ready = prepared(model)
    plain = Target.cuda(tensor_cores=False)
    without = prepare(model, (X,), modes=("train",), device=X.device, target=plain).source
    assert "FW_OTHERS" not in without.text
    recorded = Recorded(emulated(without))
    kernels_of(recorded.source, recorded).build()
    assert recorded.built == [{}]
    sections = re.findall(r"^#if (FW_\w+)\n(.*?)^#endif  // \1$", ready.source.text, re.M | re.S)
    found: dict[str, set[str]] = {}
    for macro, text in sections:
        found.setdefault(macro, set()).update(re.findall(r"^FW_ENTRY\((\w+),", text, re.M))
    wanted: dict[str, set[str]] = {}
    for entry in ready.source.entries:
        wanted.setdefault(entry.macro or "FW_OTHERS", set()).add(entry.name)
    assert found == wanted and len(wanted) == 3


@pytest.mark.parametrize(
    ("release", "cores", "groups", "parts", "split"),
    [
        ("12.5", 8, 0, 1, ""),
        ("12.6", 8, 0, 1, "--split-compile=8"),
        ("13.0", 8, 3, 3, "--split-compile=2"),
        ("13.0", 2, 3, 2, ""),
    ],
)
def test_an_emitted_file_builds_on_all_cores_where_nvcc_can(
    release: str,
    cores: int,
    groups: int,
    parts: int,
    split: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.9\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PYTORCH_NVCC", str(nvcc))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cuda, "_fw_cores", lambda: cores)
    monkeypatch.setattr(library, "_fw_cores", lambda: cores)
    given: dict[str, Any] = {}
    monkeypatch.setattr(cpp_extension, "load", lambda **more: given.update(more))
    cuda._fw_build(library._FW_CUT.join(["head", *"abc"[:groups]]), "name", tmp_path)
    texts = [Path(each).read_text() for each in given["sources"]]
    assert len(texts) == parts and all(each.startswith("head") for each in texts)
    assert sorted("".join(each.removeprefix("head") for each in texts)) == [*"abc"[:groups]]
    assert [e for e in given["extra_cuda_cflags"] if "split" in e] == ([split] if split else [])
    assert not any("split" in each for each in cuda._fw_recipe()), "the code is the same"
    monkeypatch.setenv("PYTORCH_NVCC", str(tmp_path / "nowhere"))
    assert cuda._fw_on_cores(2, cpp_extension.CUDA_HOME) == []
