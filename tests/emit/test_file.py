"""The emitted file: its rules, how it runs as bare text, its cache, its fallback."""

from __future__ import annotations

import ast
import copy
import pickle
import re
import stat
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import build
from fusewright.emit.bundle import ModuleBundle
from fusewright.emit.file import file_text
from fusewright.emit.python import Scope, identifier, literal, plain, quoted
from fusewright.emit.text import module_text
from fusewright.errors import ProblemError
from fusewright.ir.graph import Dim, Ratio, Ref, Symbolic
from fusewright.runtime import cuda, host
from tests.support.emitted_files import FORBIDDEN_WORDS, executed
from tests.support.gradients import medley_results, output_and_gradients, refuses_second_derivatives
from tests.support.handmade import Case, gemm_add_relu, medley
from tests.support.tensors import assert_same

HEADER = """gemm_add_relu: made by Fusewright, every check passed
    forward   2.71 ms "quoted" \\ slash
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(folder))
    return folder


def text_of(case: Case, source: str | None = None) -> str:
    return file_text(case.bundle, case.source if source is None else source, HEADER)


def as_cuda(bundle: ModuleBundle) -> ModuleBundle:
    """The same bundle as if it had been planned for a GPU."""
    source = replace(bundle.source, language="cuda", text='extern "C" __global__ void k() {}\n')
    return replace(bundle, language="cuda", source=source)


def test_executed_text_computes_what_the_model_does(cache: Path) -> None:
    case = gemm_add_relu()
    made = executed(text_of(case))
    eager, fast = made["Model"](3, 5), made["ModelNew"](3, 5)
    assert isinstance(fast, made["Model"]) and list(fast.state_dict()) == list(eager.state_dict())
    fast.load_state_dict(eager.state_dict())
    for training in (True, False):
        for rows in (0, 1, 4, 9):
            x = torch.randn(rows, 3)
            theirs = output_and_gradients(eager.train(training), x.clone().requires_grad_())
            assert_same(
                output_and_gradients(fast.train(training), x.clone().requires_grad_()), theirs
            )
    assert type(fast(torch.randn(2, 3)).grad_fn).__name__ == "_FwFunctionBackward"
    assert len(list(cache.glob("emitted-*.so"))) == 1 and not list(cache.glob("build-*"))
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_module_that_sys_modules_does_not_know(cache: Path) -> None:
    """Some file loaders create such modules. Annotations are strings, as compile() inherits
    here."""
    names: dict[str, Any] = {"__name__": "unregistered"}
    exec(compile(text_of(gemm_add_relu()), "<emitted>", "exec"), names)
    x = torch.randn(4, 3)
    eager, fast = names["Model"](3, 5), names["ModelNew"](3, 5)
    fast.load_state_dict(eager.state_dict())
    assert_same(
        output_and_gradients(fast, x.clone().requires_grad_()),
        output_and_gradients(eager, x.requires_grad_()),
    )


def test_a_file_refuses_second_derivatives(cache: Path) -> None:
    refuses_second_derivatives(executed(text_of(gemm_add_relu()))["ModelNew"](3, 5))


def test_several_files_twice_each_in_one_process(cache: Path) -> None:
    for case in (gemm_add_relu(), medley(), gemm_add_relu(), medley()):
        made = executed(text_of(case))
        fast = made["ModelNew"]()
        eager = copy.deepcopy(case.model)
        fast.load_state_dict(eager.state_dict())
        if case.bundle.name == "medley":
            x, index = torch.randn(4, 3), torch.arange(4)
            theirs = medley_results(eager, x.clone().requires_grad_(), index)
            mine = medley_results(fast, x.clone().requires_grad_(), index)
            assert_same(mine.pop("out"), theirs.pop("out"))
            assert_same(mine, theirs)
        else:
            x = torch.randn(4, 3)
            assert_same(fast(x), eager(x))
    assert len(list(cache.glob("emitted-*.so"))) == 2


@pytest.mark.parametrize("make", [gemm_add_relu, medley])
@pytest.mark.parametrize("language", ["host", "cuda"])
def test_text_obeys_the_checkers(make: Any, language: str) -> None:
    case = make()
    bundle = as_cuda(case.bundle) if language == "cuda" else case.bundle
    text = file_text(bundle, "class Model:\n    ...\n", HEADER)
    tree = ast.parse(text)
    assert "pass" not in text
    assert not re.search(r"\btry\b|\bexcept\b|torch\.cuda\.[Ss]tream\(", text)
    modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    modules |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not modules & {"threading", "multiprocessing", "concurrent", "concurrent.futures"}
    assert all(each.split(".")[0] in (*sys.stdlib_module_names, "torch") for each in modules)
    assert ("cpp_extension" in text and "__global__" in text) == (language == "cuda")
    own = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    named = [n for n in own if not n.startswith(("_", "custom_"))]
    assert named == ["Model", "ModelNew"]


def test_text_is_deterministic_and_shared_with_the_library() -> None:
    assert text_of(gemm_add_relu()) == text_of(gemm_add_relu())
    case = gemm_add_relu()
    made = module_text(case.bundle)
    assert made.drivers in text_of(case) and made.tables in text_of(case)
    assert case.source.strip() in text_of(case)


def test_the_file_as_a_module_in_a_new_process(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "emitted_module.py"
    path.write_text(text_of(gemm_add_relu()))
    program = (
        "import sys, pickle, copy, torch; sys.path.insert(0, sys.argv[1])\n"
        "from emitted_module import Model, ModelNew\n"
        "assert not any(name.startswith('fusewright') for name in sys.modules)\n"
        "fast = ModelNew(3, 5); x = torch.randn(4, 3)\n"
        "want = Model.forward(fast, x)\n"
        "for each in (fast, pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):\n"
        "    torch.testing.assert_close(each(x), want)\n"
        "compiled = torch.compile(fast, fullgraph=True, backend='aot_eager')\n"
        "for rows in (4, 6):\n"
        "    x = torch.randn(rows, 3, requires_grad=True)\n"
        "    a = torch.autograd.grad(compiled(x).sum(), x)\n"
        "    b = torch.autograd.grad(Model.forward(fast, x).sum(), x)\n"
        "    torch.testing.assert_close(a, b)\n"
    )
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", program, str(tmp_path)],
                   check=True)  # fmt: skip


def test_a_call_that_does_not_fit_falls_back_with_one_warning(cache: Path) -> None:
    made = executed(text_of(gemm_add_relu()))
    fast = made["ModelNew"](3, 5).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="argument 0 is torch.float64 instead of torch.float32"):
        mine = fast(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(fast(x), mine)
    assert_same(mine, made["Model"].forward(fast, x))
    with pytest.raises(RuntimeError, match="shapes cannot be mult"):
        fast(torch.randn(4, 8, dtype=torch.float64))


def test_a_damaged_library_in_the_cache_is_rebuilt(cache: Path) -> None:
    text = text_of(gemm_add_relu())
    x = torch.randn(4, 3)
    executed(text)["ModelNew"](3, 5)(x)
    (library,) = cache.glob("emitted-*.so")
    library.unlink()
    library.write_bytes(b"not a library")
    executed(text)["ModelNew"](3, 5)(x)
    assert b"ELF" in max(cache.glob("emitted-*.so"), key=lambda p: p.stat().st_size).read_bytes()


def test_a_cache_that_others_can_write_is_refused(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    cache.chmod(0o777)
    with pytest.raises(RuntimeError, match="FUSEWRIGHT_CACHE"):
        executed(text_of(gemm_add_relu()))["ModelNew"](3, 5)(torch.randn(4, 3))


def test_without_a_cache_folder_it_still_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    made = executed(text_of(gemm_add_relu()))
    fast = made["ModelNew"](3, 5)
    x = torch.randn(4, 3)
    assert_same(fast(x), made["Model"].forward(fast, x))


def test_a_missing_or_broken_compiler_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for compiler, words in (("no-such-compiler", "install"), ("false", "failed")):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(RuntimeError, match=words):
            executed(text_of(gemm_add_relu()))["ModelNew"](3, 5)(torch.randn(4, 3))


def test_the_users_names_stay_theirs(cache: Path) -> None:
    mine = (
        "'''A docstring.'''\nfrom __future__ import annotations\n"
        "def custom_add_relu(x):\n    return 'theirs'\n"
        "os = 'my os'\nhashlib = {'a': 1}\n"
    )
    theirs = gemm_add_relu().source.replace("torch.relu(", "relu(").replace("torch.randn", "randn")
    source = (
        mine
        + "from torch import relu, randn\ntorch = 7\n"
        + theirs.replace("import torch\n", "", 1)
    )
    made = executed(text_of(gemm_add_relu(), source))
    assert made["custom_add_relu"](1) == "theirs" and made["os"] == "my os" and made["torch"] == 7
    assert "custom_add_relu_2" in made and made["hashlib"] == {"a": 1}
    fast, x = made["ModelNew"](3, 5), torch.randn(4, 3, requires_grad=True)
    assert_same(fast(x), made["Model"].forward(fast, x))
    fast(x).sum().backward()


@pytest.mark.as_users_build
def test_flags_are_those_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host._FW_FLAGS.split() == list(build._flags("host", "sm_90a"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    alone = {"-shared", "-Xcompiler", "-fPIC"}  # PyTorch adds its own
    library = [flag for flag in build._flags("cuda", "sm_90a") if flag not in alone]
    assert [flag for flag in cuda._fw_flags() if not flag.startswith("-U")] == library


def test_source_that_is_not_python_is_a_named_error() -> None:
    with pytest.raises(ProblemError, match="not Python"):
        file_text(gemm_add_relu().bundle, "class Model(", HEADER)


def test_names_and_strings_cannot_become_code() -> None:
    evil = 'x"; import os; os.system("bypass")\n#'
    assert ast.literal_eval(quoted(evil)) == evil
    assert identifier(evil).isidentifier() and identifier("class") == "class_v"
    assert identifier("bypass").isidentifier() and "pass" not in identifier("bypass")
    assert '"' not in plain('"""') and "\n" not in plain("a\nb")
    assert identifier("").isidentifier() and identifier("1é").isascii()


def test_arguments_become_expressions() -> None:
    scope = Scope({"a": "a_v"}, "cuda")
    given = {
        "a_v": Ref("a"),
        "[1, None, True]": (1, None, True),
        "torch.float32": Symbolic("dtype", "float32"),
        "device": Symbolic("device", "cuda:0"),
        'torch.device("cpu")': Symbolic("device", "cpu"),
        "64*s0": Dim(64, ("s0",)),
        'float("inf")': float("inf"),
        '(1.0/s0 if s0 else float("nan"))': Ratio("1.0/s0"),
        '"x"': "x",
    }
    for text, arg in given.items():
        assert literal(arg, scope) == text  # type: ignore[arg-type]


def test_pickled_text_of_a_model_is_the_same_model(cache: Path) -> None:
    made = executed(text_of(gemm_add_relu()))
    fast = made["ModelNew"](3, 5)
    state = pickle.loads(pickle.dumps(fast.state_dict()))
    other = made["ModelNew"](3, 5)
    other.load_state_dict(state)
    x = torch.randn(4, 3)
    assert_same(other(x), fast(x))


def test_words_are_kept_on_request() -> None:
    source = "class Model:  # one pass\n    pass\n"
    kept = file_text(gemm_add_relu().bundle, source, "a pass", keep_words=True)
    assert source in kept and '"""a pass' in kept
    respelt = file_text(gemm_add_relu().bundle, source, "a pass")
    assert "class Model:  # one p·ass\n    ...\n" in respelt and '"""a p·ass' in respelt
    assert not re.search(FORBIDDEN_WORDS, respelt)
