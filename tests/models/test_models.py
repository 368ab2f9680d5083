"""Real models: a training step is as exact as eager mode's. `make models` runs all of them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import fusewright
from tests.models.step import compared
from tests.models.zoo import TEXT, VISION, packages

pytest.importorskip("transformers")
SAMPLE = ("BERT", "GPT-2")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in TEXT]
)
@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_of_a_transformer(name: str, autocast: bool) -> None:
    found = compared(TEXT[name](), autocast)
    assert not found.wrong
    assert found.facts["graphs"] >= 2  # forward and backward


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_of_a_vision_model(name: str, autocast: bool) -> None:
    try:
        packages()
    except ImportError as error:
        pytest.skip(str(error))
    found = compared(VISION[name](), autocast)
    assert not found.wrong


@pytest.mark.parametrize("name", ["GPT-2", pytest.param("T5", marks=pytest.mark.slow)])
def test_generate(name: str) -> None:
    case = TEXT[name]()
    model = case.model.eval()
    words = torch.randint(3, 99, (2, 5))
    how = {"max_new_tokens": 8, "do_sample": False}
    expected = copy.deepcopy(model).generate(words, **how)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*original forward.*")
        fast = fusewright.optimize(model, case.args, case.kwargs)
        assert torch.equal(fast.generate(words, **how), expected)
    told = fusewright.explain(fast)
    assert not told.fallbacks and told.graphs
    assert sum(count for _, count in told.recompilations) <= 3
