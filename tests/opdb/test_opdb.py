"""150 operators of PyTorch's own database beside eager mode; `make opdb` has all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.codegen.source import Source
from fusewright.errors import CompileFailed
from tests.opdb.cases import Entry, entries, entry_of
from tests.opdb.compare import differences
from tests.opdb.known import reason_for
from tests.opdb.runs import Run
from tests.opdb.sweep import sweep
from tests.opdb.together import Together
from tests.opdb.variants import LAYOUTS
from tools.opdb import _Found, _Timed, judged

COUNT, CHUNK = 150, 10


def sample() -> list[Entry]:
    every = entries("operator", ["float32"], "cpu")
    return [every[at * len(every) // COUNT] for at in range(COUNT)]


def chunks() -> list[int]:
    return list(range(0, COUNT, CHUNK))


@pytest.mark.parametrize("first", chunks())
def test_operators(first: int) -> None:
    """The first sample of each, and one other layout."""
    told: list[dict[str, Any]] = []
    layout = [*LAYOUTS][first // CHUNK % len(LAYOUTS)]
    sweep(sample()[first : first + CHUNK], "cpu", told.append, ("first", layout, "special"))
    done = [each for each in told if each["step"] == "done"]
    assert sum(each.get("comparisons", 0) for each in done) >= CHUNK
    # Eager beside eager would agree, too.
    ours = [each for each in done if each["how"] in ("fused", "dynamo")]
    assert 2 * len(ours) > sum(each["how"] != "refused" for each in done)
    found = [
        f"{each['case']}: {words}"
        for each in done
        for words in each.get("wrong", ())
        if not reason_for(*entry_of(each["case"]), "cpu", words)
    ]
    assert found == []


def _run(output: Tensor, gradient: Tensor | None = None, failed: str = "") -> Run:
    return Run([output], {"gradient of input 0": gradient}, {}, failed)


SEEN = torch.tensor([[1.0, -2.0], [3.0, 1e-9]])
WRONG = {
    "a value": _run(SEEN * torch.tensor([1.0, 1.001]), SEEN),
    "a small value": _run(SEEN + torch.tensor([0.0, 2e-9]), SEEN),
    "a dtype": _run(SEEN.double(), SEEN),
    "a shape": _run(SEEN[None], SEEN),
    "strides": _run(SEEN.t().contiguous().t(), SEEN),
    "a gradient": _run(SEEN, -SEEN),
    "a lost gradient": _run(SEEN, None),
    "NaN": _run(SEEN.log(), SEEN),
    "an error": Run(failed="forward: RuntimeError"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_difference_is_noticed(what: str) -> None:
    eager = _run(SEEN, SEEN)
    truth = _run(SEEN.double(), SEEN.double())
    assert differences(eager, eager, truth, by_element=True) == []
    assert len(differences(WRONG[what], eager, truth, by_element=True)) == 1


def test_zeros_have_signs() -> None:
    zero = torch.zeros(2)
    assert differences(_run(-zero), _run(zero), Run(), by_element=True)
    assert not differences(_run(-zero), _run(zero), Run())


def test_a_kernel_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases around it still run."""
    opened = Together._opened

    def fails(self: Together, source: Source) -> Any:
        if "exp2" in source.text:
            raise CompileFailed("the compiler is tired")
        return opened(self, source)

    monkeypatch.setattr(Together, "_opened", fails)
    told: list[dict[str, Any]] = []
    names = ("ceil", "exp2", "neg")
    sweep([Entry("operator", name, "float32") for name in names], "cpu", told.append, ("first",))
    done = {each["case"].split()[0]: each for each in told if each["step"] == "done"}
    assert done["ceil"]["wrong"] == done["neg"]["wrong"] == []
    assert done["ceil"]["how"] == done["neg"]["how"] == "fused"
    assert "the compiler is tired" in done["exp2"]["wrong"][0]


def test_cases_through_torch_compile_can_be_skipped() -> None:
    told: list[dict[str, Any]] = []
    entries = [Entry("operator", name, "float32") for name in ("nonzero", "neg")]
    sweep(entries, "cpu", told.append, ("first",), by_dynamo=False)
    done = {each["case"]: each["how"] for each in told if each["step"] == "done"}
    assert done == {"nonzero float32 first": "skipped", "neg float32 first": "fused"}


def test_an_abort_of_the_compiler_divides_the_chunk() -> None:
    asked: list[list[str]] = []

    def ask(items: list[list[str]]) -> tuple[list[dict[str, Any]], str]:
        asked.append([name for _, name, _ in items])
        done = [{"step": "done", "case": f"{name} float32 first", "how": "fused"} for name in "ac"]
        if asked[-1] == ["c"]:
            return [{"step": "build", "case": "kernels"}], "status -9"
        if "c" in asked[-1]:
            return [done[0], {"step": "build", "case": "kernels"}], "status -9"
        return done[:1], ""

    found = list(judged([["operator", name, "float32"] for name in "abc"], ask))
    assert asked == [["a", "b", "c"], ["a"], ["b", "c"], ["b"], ["c"]]
    assert [each["how"] for each in found] == ["fused", "fused", "abort"]
    assert found[-1]["wrong"] == ["build: status -9"]


def test_chunks_that_may_end_too_late_are_not_begun(tmp_path: Path) -> None:
    timed = _Timed(100.0)
    assert timed.run(list) == []
    timed._longest = 101.0
    assert timed.run(list) is None
    found = _Found("cpu", tmp_path / "lines.json")
    found.add([{"step": "done", "case": "neg float32 first", "how": "fused", "wrong": ["odd"]}])
    found.add([{"step": "built", "kernels": 2}])
    assert (found.bad, found.cases, found.counts["kernels"]) == (1, 1, 2)
    assert len((tmp_path / "lines.json").read_text().splitlines()) == 2


def test_an_abort_is_named() -> None:
    """The entries that are left run in another process."""
    asked: list[list[list[str]]] = []

    def ask(items: list[list[str]]) -> tuple[list[dict[str, Any]], str]:
        asked.append(items)
        if len(asked) > 1:
            return [{"step": "done", "case": "c float32 first", "how": "fused"}], ""
        return [{"step": "optimize", "case": "b float32 first"}], "status -6"

    items = [["operator", name, "float32"] for name in "abc"]
    found = list(judged(items, ask))
    assert [each["how"] for each in found] == ["abort", "fused"]
    assert found[0]["case"] == "b float32 first"
    assert found[0]["wrong"] == ["optimize: status -6"]
    assert [name for _, name, _ in asked[1]] == ["a", "c"]
