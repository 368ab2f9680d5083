"""`save`: the file of an optimized module, in use, and what forbids one."""

from __future__ import annotations

import importlib.util
import linecache
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.errors import OutputError, ProblemError, SaveError
from tests.support.emitted_files import executed

SCRIPT = '''\
"""A script that trains."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor, nn

# How much wider each layer is.
WIDTHS = {"first": 1}
WIDTHS["second"] = 2
x = "nothing that the model reads"
print("training begins")


def scaled(x: Tensor) -> Tensor:
    return x * 2


@torch.no_grad()
def evaluate(path: str) -> None:
    os.remove(path)


class Block(nn.Module):
    def __init__(self, n: int, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(n, n * WIDTHS[kind])

    def forward(self, x: Tensor) -> Tensor:
        return scaled(self.layer(x)).relu() * math.sqrt(2)


class Net(nn.Module):
    def __init__(self, n: int, *, bias: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(n, "first"), Block(n, "second"))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.blocks(x) + self.bias, -1)


if __name__ == "__main__":
    evaluate("everything")
'''

USE = """
import sys, warnings
warnings.simplefilter("error")
import torch
from net_new import ModelNew, Net
given = torch.load("given.pt")
model = ModelNew(8, bias=0.5)
model.load_state_dict(given["state"])
x = given["x"].requires_grad_()
out = model(x)
assert type(out.grad_fn).__name__ == "_FwFunctionBackward", out.grad_fn
(out * given["weight"]).sum().backward()
grads = {name: each.grad for name, each in model.named_parameters()}
torch.save({"out": out.detach(), "x": x.grad, **grads}, "found.pt")
assert "fusewright" not in sys.modules and isinstance(model, Net)
"""


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def imported(path: Path, source: str) -> ModuleType:
    """The module of a file with this source."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_a_saved_file_in_another_process(tmp_path: Path) -> None:
    script = imported(tmp_path / "a_script.py", SCRIPT)
    model, x = script.Net(8, bias=0.5), torch.randn(6, 8)
    fast: Any = fusewright.optimize(model, torch.randn(4, 8))
    assert fast.save(tmp_path / "net_new.py") == tmp_path / "net_new.py"
    weight = torch.randn(6, 16)
    given = {"state": model.state_dict(), "x": x, "weight": weight}
    torch.save(given, tmp_path / "given.pt")
    ran = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout == "", ran.stderr
    found = torch.load(tmp_path / "found.pt")
    x.requires_grad_()
    out = model(x)
    (out * weight).sum().backward()
    wanted = {"out": out.detach(), "x": x.grad}
    wanted |= {name: each.grad for name, each in model.named_parameters()}
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-6, rtol=1e-5)


def test_a_file_has_what_the_class_needs_and_no_more(tmp_path: Path) -> None:
    script = imported(tmp_path / "b_script.py", SCRIPT)
    fast: Any = fusewright.optimize(script.Net(8), torch.randn(4, 8))
    text = fast.save(tmp_path / "deeper" / "net_new.py").read_text()
    top = text[: text.index("# ---- the fused kernels")]
    for line in ("import math", 'WIDTHS["second"] = 2', "# How much wider each layer is.",
                 "def scaled(x: Tensor) -> Tensor:", "class Block(nn.Module):"):  # fmt: skip
        assert f"\n{line}\n" in top, line
    for word in ("import os", "training begins", "evaluate", "__main__", "nothing that"):
        assert word not in top
    assert "class ModelNew(Net):" in text
    assert "takes the constructor's arguments of Net" in top


def test_a_problem_keeps_its_functions(tmp_path: Path) -> None:
    source = (
        "import torch\nfrom torch import nn\n\nROWS = 4\n\n\n"
        "class Model(nn.Module):\n    def forward(self, x):\n        return x.relu() + 1\n\n\n"
        "def get_inputs():\n    return [torch.randn(ROWS, 3)]\n\n\n"
        "def get_init_inputs():\n    return []\n"
    )
    problem = imported(tmp_path / "c_problem.py", source)
    fast: Any = fusewright.optimize(problem.Model(), torch.randn(4, 3))
    names = executed(fast.save(tmp_path / "c_new.py").read_text())
    (x,) = names["get_inputs"]()
    assert names["get_init_inputs"]() == []
    torch.testing.assert_close(names["ModelNew"]()(x), x.relu() + 1)


def test_a_class_of_pytorch_is_imported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    fast: Any = fusewright.optimize(model, torch.randn(4, 8))
    names = executed(fast.save(tmp_path / "d_new.py").read_text())
    new = names["ModelNew"](nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    new.load_state_dict(model.state_dict())
    x = torch.randn(5, 8)
    out = new(x)
    assert type(out.grad_fn).__name__ == "_FwFunctionBackward"
    torch.testing.assert_close(out, model(x), atol=1e-6, rtol=1e-5)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(check=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.settings.check and x.sum() > 0:
            return x.tanh()
        return x.sin()


def test_a_guard_and_a_break_that_forbid_it(tmp_path: Path) -> None:
    fast: Any = fusewright.optimize(Reads(), torch.randn(3))
    line = Reads.forward.__code__.co_firstlineno + 1
    with pytest.raises(SaveError) as refused:
        fast.save(tmp_path / "e_new.py")
    first, how = str(refused.value).split("\n")
    reason = "forward reads self.settings, and a file has no guard for that"
    assert first == f"{__file__}:{line}: {reason}" and "a buffer of the model" in how
    fast.settings.check = True
    fast(torch.randn(3))
    with pytest.raises(SaveError) as refused:
        fast.save(tmp_path / "e_new.py")
    broken = "a branch depends on the values of a tensor, which breaks the graph"
    assert str(refused.value).split("\n")[1] == f"{__file__}:{line}: {broken}"
    assert not (tmp_path / "e_new.py").exists()


PLAIN = (
    "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x): return x.relu() + 1\n"
)


def saved(kind: type[nn.Module], path: Path) -> Path:
    fast: Any = fusewright.optimize(kind(), torch.randn(3))
    return Path(fast.save(path))


def test_sources_that_do_not_stand_on_their_own(tmp_path: Path) -> None:
    new = tmp_path / "f_new.py"

    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu()

    with pytest.raises(SaveError, match=r"<locals>.Local is defined inside a function: move it"):
        saved(Local, new)
    names: dict[str, Any] = {"__name__": "nowhere"}
    exec(PLAIN, names)
    with pytest.raises(SaveError, match="source of the class Net is not known: define it in a"):
        saved(names["Net"], new)
    near = imported(tmp_path / "f_near.py", "def half(x):\n    return x / 2\n")
    relative = PLAIN.replace("x.relu()", "half(x)")
    package = imported(tmp_path / "f_net.py", relative)
    vars(package)["half"] = vars(near)["half"]
    with pytest.raises(SaveError, match=r"f_net.py: Net uses half, which its source does not"):
        saved(package.Net, new)
    assert not new.exists()


def test_a_relative_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "f_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "near.py").write_text("def half(x):\n    return x / 2\n")
    source = "from .near import half\n" + PLAIN.replace("x.relu()", "half(x)")
    (folder / "net.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("f_package.net").Net
    with pytest.raises(SaveError, match=r"net.py:1: .* cannot use this relative import"):
        saved(kind, tmp_path / "f_new.py")


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "g_net.py"
    kind = imported(path, PLAIN).Net
    assert saved(kind, tmp_path / "g_new.py").exists()
    path.write_text(PLAIN.replace("+ 1", "- 1"))
    linecache.clearcache()  # as if nobody had read the file before it changed
    with pytest.raises(SaveError, match=r"g_net.py:3: this file has changed since it was imported"):
        saved(kind, tmp_path / "g_new.py")


def test_a_forward_of_another_file_is_refused(tmp_path: Path) -> None:
    kind = imported(tmp_path / "j_net.py", PLAIN).Net
    kind.forward = lambda self, x: x.relu() + 2
    with pytest.raises(SaveError, match=r"test_save.py:\d+: forward of Net was replaced"):
        saved(kind, tmp_path / "j_new.py")


def test_a_forward_that_the_file_replaces(tmp_path: Path) -> None:
    more = "def other(self, x):\n    return x.relu() + 2\nNet.forward = other\n"
    kind = imported(tmp_path / "k_net.py", PLAIN + more).Net
    new = executed(saved(kind, tmp_path / "k_new.py").read_text())["ModelNew"]
    x = torch.randn(3)
    torch.testing.assert_close(new()(x), x.relu() + 2)
    with pytest.warns(RuntimeWarning, match="the original forward runs"):
        torch.testing.assert_close(new()(x.double()), x.double().relu() + 2)


ASKS = """
import torch
from torch import nn


class Asks(nn.Module):
    def forward(self, x):
        return x.relu() * getattr(self, "scale", 2.0)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Asks()

    def forward(self, x):
        return self.part(x) + (1.0 if hasattr(self, "more") else 0.0)
"""


@pytest.mark.filterwarnings("ignore:the original forward runs")
@pytest.mark.parametrize("change", ["part.scale", "more"])
def test_a_file_notices_an_attribute_that_was_missing(change: str, tmp_path: Path) -> None:
    model, x = imported(tmp_path / "asks_for.py", ASKS).Whole(), torch.randn(3, 4)
    path = fusewright.save(fusewright.optimize(model, x), tmp_path / "asks_new.py")
    fresh = executed(path.read_text())["ModelNew"]()
    torch.testing.assert_close(fresh(x), model(x))
    owner, _, name = change.rpartition(".")
    setattr(fresh.get_submodule(owner), name, 5.0)
    setattr(model.get_submodule(owner), name, 5.0)
    torch.testing.assert_close(fresh(x), model(x))


def test_paths_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "h_net.py"
    kind = imported(path, PLAIN).Net
    with pytest.raises(OutputError, match="this is the source of Net"):
        saved(kind, path)
    assert path.read_text() == PLAIN
    with pytest.raises(ProblemError, match=r"name a .py file; for weights, use torch.save"):
        saved(kind, tmp_path / "weights.pt")
    with pytest.raises(ProblemError, match="save cannot write this Net"):
        fusewright.save(kind(), tmp_path / "h_new.py")


def test_a_pickle_has_nothing_to_save(tmp_path: Path) -> None:
    fast = fusewright.optimize(nn.Sequential(nn.ReLU()), torch.randn(3))
    with pytest.raises(SaveError, match="a pickle has none; call"):
        fusewright.save(pickle.loads(pickle.dumps(fast)), tmp_path / "i_new.py")
