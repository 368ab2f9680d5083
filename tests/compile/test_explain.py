"""`explain`: what is fused, what is not, and what became of the calls."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright import debug
from fusewright.compile import backend
from fusewright.compile.explanation import Explanation
from fusewright.compile.record import MOST_REASONS, OTHER_REASONS, Record
from fusewright.errors import CaptureError, ProblemError


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()  # the graphs of earlier tests
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.layer(x).relu(), -1) * 3


class Checked(nn.Module):
    """Reads an object, and branches on values if that object says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.settings = SimpleNamespace(check=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu() * (2 if self.settings.check else 3)
        if self.settings.check and y.sum() > 0:
            return y.tanh()
        return y.sin()


def line_of(kind: type, text: str) -> str:
    """The file and line of the first line of a class that contains this text."""
    lines, first = inspect.getsourcelines(kind)
    return f"{__file__}:{first + next(at for at, line in enumerate(lines) if text in line)}"


def explained(fast: Any) -> Explanation:
    found: Explanation = fusewright.explain(fast)
    return found


def test_graphs_of_our_own_guards() -> None:
    found = explained(fusewright.optimize(Net(), torch.randn(4, 5, 8)))
    parts = ["forward", "inference", "backward"]
    assert [(each.mode, each.part) for each in found.graphs] == [
        (mode, part) for mode in ("train", "eval") for part in parts
    ]
    forward = found.graphs[0]
    assert forward.inputs == ("x: float32[s0, 5, 8]",) and forward.sizes == (("s0", 4),)
    assert [each.operators for each in forward.fused] == [
        ("relu", "max", "sub", "exp", "sum", "div", "mul")
    ]
    assert forward.kernels == 1 and not forward.by_dynamo
    (call,) = forward.calls
    assert call.operator == "aten.addmm.default" and "matmul" in call.reason
    assert (found.torch_compile, found.breaks, found.unguarded) == ("", (), ())
    assert (found.fallbacks, found.recompilations, found.left_out) == ((), (), ())


def test_the_text_says_equal_graphs_once() -> None:
    text = str(explained(fusewright.optimize(Net(), torch.randn(4, 5, 8))))
    lines = text.splitlines()
    assert lines[0] == "Net: 6 graphs, 8 fused kernels, 8 PyTorch calls"
    title = "train and eval mode, forward with gradients of x: float32[s0, 5, 8] "
    at = lines.index(f"{title}(s0 = 4; 1 kernel, 1 PyTorch call)")
    name = "custom_relu_max_to_mul"
    assert lines[at + 1] == f"  fused  {name}: relu → max → sub → exp → sum → div → mul"
    assert lines[at + 2].startswith("  call   aten.addmm.default: PyTorch's matmul")
    assert lines[-1] == "recompilations: none" and lines[-5] == "graph breaks: none"


def test_a_graph_break_and_dynamos_recompilations() -> None:
    model, x = Checked(), torch.randn(4, 8)
    fast = fusewright.optimize(model, x)
    before = explained(fast)
    assert before.torch_compile == "forward reads self.settings" and before.graphs == ()
    assert before.unguarded == (
        f"{line_of(Checked, '2 if self.settings')}: forward reads self.settings",
    )
    fast(x).sum().backward()
    assert explained(fast).breaks == ()
    model.settings.check = True
    torch.testing.assert_close(fast(x), model(x))
    found = explained(fast)
    assert [str(each) for each in found.breaks] == [
        f"{line_of(Checked, 'y.sum() > 0')}: a branch depends on the values of a tensor"
    ]
    assert found.recompilations == (("a guard of Dynamo failed: self.settings.check == False", 1),)
    first = found.graphs[0]
    assert (first.mode, first.part, first.by_dynamo) == ("train", "forward", True)
    assert first.inputs == ("x: float32[4, 8]",)
    assert {each.part for each in found.graphs} == {"forward", "backward"}
    assert any(each.fused[0].operators == ("tanh",) for each in found.graphs)


@torch._dynamo.config.patch(recompile_limit=2)
def test_the_limit_of_dynamo() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = SimpleNamespace(scale=2)

        def forward(self, x: Tensor) -> Tensor:
            return x.relu() * self.settings.scale

    fast: Any = fusewright.optimize(Scaled(), torch.randn(3))
    x = torch.randn(3)
    fast(x)
    assert explained(fast).limit is None
    for scale in (3, 4):
        fast.settings.scale = scale
        torch.testing.assert_close(fast(x), x.relu() * scale)
    found = explained(fast)
    assert found.limit == 2 and len(found.graphs) == 2
    assert "compiled forward 2 times, which is its limit: a call that" in str(found)
    assert found.recompilations == (("a guard of Dynamo failed: self.settings.scale == 2", 1),)


def test_a_break_before_the_first_operator() -> None:
    class Prints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = SimpleNamespace(word="")

        def forward(self, x: Tensor) -> Tensor:
            if self.settings.word:
                torch._dynamo.graph_break()
            return x.relu() + 1

    fast = fusewright.optimize(Prints(), torch.randn(3))
    fast.settings.word = "hello"
    fast(torch.randn(3))
    (found,) = explained(fast).breaks
    assert f"{found.file}:{found.line}" == line_of(Prints, "torch._dynamo.graph_break")
    assert "graph_break" in found.reason


def test_a_new_length_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(debug, "tell", lambda words, *facts: told.append(words % facts))
    fast = fusewright.optimize(Net(), torch.randn(4, 5, 8))
    for length in (5, 6, 7, 9):
        fast(torch.randn(4, length, 8)).sum().backward()
    fast.double()(torch.randn(4, 5, 8, dtype=torch.float64))
    reason = "argument 0 has shape (4, 6, 8) instead of (4, 5, 8)"
    assert len(told) == 1 and told[0].startswith(f"Net was recompiled because {reason} (later")
    found = explained(fast)
    assert found.recompilations[0] == (reason, 1) and len(found.recompilations) == 2
    assert "float64" in found.recompilations[1][0]
    symbolic = [each for each in found.graphs if each.by_dynamo]
    assert [value for _, value in symbolic[0].sizes] == [4, 6]


def test_the_first_program_of_a_mode_is_no_recompilation() -> None:
    fast = fusewright.optimize(Net(), torch.randn(4, 8), modes=("train",)).eval()
    fast(torch.randn(4, 8))
    found = explained(fast)
    assert found.recompilations == () and found.graphs[-1].mode == "eval"


def test_calls_that_ran_the_original_forward() -> None:
    fast: Any = fusewright.optimize(Net(), torch.randn(4, 8))
    handle = fast.layer.register_forward_hook(lambda *call: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            fast(torch.randn(4, 8))
    handle.remove()
    fast(torch.randn(4, 8))
    reason = "hooks of layer must see its calls, and the kernels do not call it"
    assert explained(fast).fallbacks == ((reason, 3),)
    assert f"calls that ran the original forward:\n  3 times: {reason}\n" in str(explained(fast))


def test_hooks_of_a_model_that_dynamo_runs() -> None:
    fast: Any = fusewright.optimize(Checked(), torch.randn(4, 8))
    fast.layer.register_forward_hook(lambda *call: None)
    fast(torch.randn(4, 8))
    ((reason, count),) = explained(fast).fallbacks
    assert count == 1 and reason.startswith("hooks of layer")


def test_a_mode_without_a_graph() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() * 2 if self.training or x.sum() > 0 else x

    fast = fusewright.optimize(Half(), torch.randn(3))
    fast.eval()(torch.ones(3))
    ((mode, reason),) = explained(fast).left_out
    assert mode == "eval" and "depends on the values of a tensor" in reason
    assert not explained(fast).fallbacks
    assert [each.line for each in explained(fast).breaks] != []
    assert any(each.by_dynamo and each.mode == "eval" for each in explained(fast).graphs)


def test_a_graph_that_pytorch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise CaptureError("no word for it")

    class Other(Checked):  # classes share their graphs
        def forward(self, x: Tensor) -> Tensor:
            return x + (1 if self.settings.check else 2)

    fast = fusewright.optimize(Other(), torch.randn(4, 8))
    monkeypatch.setattr(backend, "_compiled", refuse)
    with pytest.warns(RuntimeWarning, match="no word for it"), torch.no_grad():
        fast(torch.randn(4, 8))
    (graph,) = explained(fast).graphs
    assert (graph.part, graph.kernels, graph.refused) == ("inference", 0, "no word for it")
    assert "PyTorch runs it, operator by operator: no word for it" in str(explained(fast))


def test_copies_and_pickles() -> None:
    fast: Any = fusewright.optimize(Net(), torch.randn(4, 8))
    fast.double()(torch.randn(4, 8, dtype=torch.float64))
    handle = fast.layer.register_forward_hook(lambda *call: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast(torch.randn(4, 8, dtype=torch.float64))
    handle.remove()
    whole, twin = explained(fast), explained(copy.deepcopy(fast))
    assert len(whole.fallbacks) == 1 and twin.fallbacks == ()
    assert twin.graphs == whole.graphs and twin.recompilations == whole.recompilations
    back = pickle.loads(pickle.dumps(fast))
    assert explained(back).graphs == () and explained(back).recompilations == ()
    back(torch.randn(4, 8, dtype=torch.float64))
    (first, *_) = explained(back).graphs
    assert first.inputs == ("x: float64[s0, 8]",) and explained(back).recompilations == ()


def test_threads_count_every_call() -> None:
    record = Record()

    def write() -> None:
        for number in range(500):
            record.ran_original(f"reason {number % 7}")

    threads = [threading.Thread(target=write) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sum(record.fallbacks().values()) == 8 * 500 and len(record.fallbacks()) == 7


def test_many_reasons_are_counted_together() -> None:
    record = Record()
    for number in range(MOST_REASONS + 10):
        record.ran_original(f"reason {number}")
    assert record.fallbacks()[OTHER_REASONS] == 10
    assert len(record.fallbacks()) == MOST_REASONS + 1


class OwnMethods(Net):
    def explain(self) -> str:
        return "mine"

    @property
    def save(self) -> str:
        return "my file"


class OwnParts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.explain = nn.Linear(8, 8)
        self.register_buffer("save", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.explain(super().forward(x)) + self.save


class Delegates(Net):
    def __getattr__(self, name: str) -> Any:
        return "from elsewhere" if name == "explain" else super().__getattr__(name)


def test_the_models_own_names_win() -> None:
    x = torch.randn(4, 8)
    own: Any = fusewright.optimize(OwnMethods(), x)
    assert own.explain() == "mine" and own.save == "my file"
    model = OwnParts()
    parts: Any = fusewright.optimize(model, x)
    assert parts.explain is model.explain and parts.save is model.save
    torch.testing.assert_close(parts(x), model(x))
    asked: Any = fusewright.optimize(Delegates(), x)
    assert asked.explain == "from elsewhere"
    for each in (own, parts, asked):
        assert len(explained(each).graphs) == 6
    plain: Any = fusewright.optimize(Net(), x)
    assert isinstance(plain.explain(), Explanation)
    plain.explain = "set later"
    assert plain.explain == "set later"


def test_other_modules_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"explain knows nothing of this Net; .*optimize"):
        fusewright.explain(Net())
