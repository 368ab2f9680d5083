"""Random Python state that forward reads, changed at random between calls: eager is the truth.

tests/fuzz_state.py draws and compares; here are a sample of it, and what it has found.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fusewright
from fusewright.runtime import altered
from tests.fuzz_state import Side, failure, told
from tests.support.python_state import STATES, Case, Read, Step, drawn, of_state

# Changes of which our guards or Dynamo's did not notice one.
FOUND = (
    "sign of zero",
    "sign of zero in a tuple",
    "ordered dict",
    "getattr of the class",
    "method of the class",
    "method of an object's class",
    "method of a layer",
    "alias",
    "cycle",
    "environment",
    "name that hides a builtin",
    "counter in the file",
    "counter in a closure",
    "counter of the class",
    "result in another file",
)


@pytest.mark.sample(42)
@pytest.mark.parametrize("seed", range(500))
def test_random_changes(seed: int) -> None:
    assert told(drawn(seed)) == ""


@pytest.mark.parametrize("name", FOUND)
def test_changes_that_were_not_noticed(name: str) -> None:
    assert failure(of_state(name)) == ""


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", [name for name in STATES if name not in FOUND])
def test_all_changes_of_one_state(name: str) -> None:
    assert failure(of_state(name)) == ""


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", [name for name, each in STATES.items() if each.ours])
def test_states_that_our_own_guards_compare(name: str, tmp_path: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Side(of_state(name), tmp_path, "eager").model
        fast = fusewright.optimize(model, torch.randn(3, 4))
    assert fast.__dict__["_fw_engine"].modes, "our own program runs"


def test_a_stale_program_is_found_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail, and the program that it prints lacks all that is not needed."""
    monkeypatch.setattr(altered._FwSnapshot, "holds", lambda self, module, mode: True)
    read = Read("float", 0, ("0.5", "1.5", "3.0"))
    steps = (Step("m.part.unrelated = 1.0", calls=0), Step(), Step("m.v0 = 1.5", calls=1))
    words = told(Case(7, "optimize", (read,), steps))
    assert words.startswith("seed 7: step 1, call 0: output")
    assert "m.v0 = 1.5" in words and "unrelated" not in words
