"""Models that change their attributes: after each call all is as eager would leave it."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.compile.solution import solve
from fusewright.emit.file import file_text
from tests.support import stateful_models
from tests.support.emitted_files import executed
from tests.support.stateful_models import BATCH, STATEFUL, WIDTH, Cell, Masked, Notes

OURS = frozenset(vars(nn.Module()))
Outcome = list[Tensor | None] | str


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple | deque):
        yield f"{name}: {type(value).__name__}", len(value)
        for at, each in enumerate(value):
            yield from leaves(f"{name}[{at}]", each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(f"{name}[{key!r}]", each)
    else:
        yield name, value


def attributes(model: nn.Module) -> dict[str, Any]:
    """The attributes of the model's own classes; of tensors also whether they have a graph."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        own = {} if type(module).__module__.startswith("torch.nn.") else vars(module)
        for name, value in own.items():
            if name not in OURS and not name.startswith("_fw_"):
                found.update(leaves(f"{path}.{name}", value))
    return {
        n: (v.detach(), v.requires_grad) if isinstance(v, Tensor) else v for n, v in found.items()
    }


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def emitted(kind: type[nn.Module]) -> type[nn.Module]:
    """ModelNew of the emitted file."""
    solution = solve(made(kind), (torch.randn(BATCH, WIDTH),))
    source = inspect.getsource(stateful_models) + f"\n\nclass Model({kind.__name__}): ...\n"
    new: type[nn.Module] = executed(file_text(solution.bundle, source, ""))["ModelNew"]
    return new


def step(model: nn.Module, x: Tensor, what: str, losses: list[Tensor]) -> Outcome:
    """Outputs and gradients of one call, or the beginning of its error."""
    if what == "no_grad":
        with torch.no_grad():
            return [model(x.clone())]
    given = x.clone().requires_grad_(what == "inputs")
    model.zero_grad(set_to_none=True)
    try:
        y = model(given)
        losses.append((y * torch.linspace(0.5, 1.5, y.numel()).view_as(y)).sum())
        if what == "later":
            return [y.detach()]
        torch.autograd.backward(losses)
    except RuntimeError as error:
        losses.clear()
        return str(error)[:40]
    losses.clear()
    return [y.detach(), given.grad, *(each.grad for each in model.parameters())]


def assert_alike(models: dict[str, nn.Module], plan: list[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    losses: dict[str, list[Tensor]] = {name: [] for name in models}
    for at, what in enumerate(plan):
        if what in ("train", "eval"):
            for model in models.values():
                model.train(what == "train")
            continue
        x = torch.randn(BATCH, WIDTH, generator=generator)
        found = {name: step(model, x, what, losses[name]) for name, model in models.items()}
        right = attributes(models["eager"])
        for name in ("ours", "emitted"):
            words = f"{name} after {plan[: at + 1]}"
            if isinstance(found["eager"], str):
                assert found[name] == found["eager"], words
            else:
                assert_same(found[name], found["eager"], words)
            assert_same(attributes(models[name]), right, words)


def assert_same(mine: Any, theirs: Any, words: str) -> None:
    torch.testing.assert_close(mine, theirs, msg=lambda text: f"{words}: {text}")


# "later" leaves the loss for the next backward, through two calls.
PLANS = (
    ["inputs", "no_grad", "no_grad", "later", "parameters", "eval", "no_grad", "inputs"],
    ["no_grad", "parameters", "train", "later", "later", "inputs", "eval", "later", "no_grad"],
    ["eval", "no_grad", "parameters", "no_grad", "inputs", "train", "no_grad", "parameters"],
)


@pytest.mark.parametrize("kind", STATEFUL, ids=lambda kind: kind.__name__)
def test_outputs_gradients_and_attributes_are_eagers(kind: type[nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Dynamo reads it of a state that has a graph.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        model = made(kind)
        before = attributes(model)
        ours, new = fusewright.optimize(model, torch.randn(BATCH, WIDTH)), emitted(kind)
        assert_same(attributes(model), before, "optimizing leaves the model alone")
        for seed, plan in enumerate(PLANS):
            models = {"eager": made(kind), "ours": copy.deepcopy(ours), "emitted": made(new)}
            assert_alike(models, plan, seed)


def test_another_batch_runs_the_same_kernels() -> None:
    model = made(Notes)
    ours = fusewright.optimize(copy.deepcopy(model), torch.randn(BATCH, WIDTH))
    programs = len(modes_of(ours))
    for rows in (BATCH, BATCH + 3, 2):
        x = torch.randn(rows, WIDTH)
        assert_same(ours(x), model(x), "")
    assert_same(attributes(ours), attributes(model), "")
    assert len(modes_of(ours)) == programs


def test_a_state_of_another_batch_size_is_pytorchs_error() -> None:
    model = made(Cell)
    ours = fusewright.optimize(copy.deepcopy(model), torch.randn(BATCH, WIDTH))
    for each in (model, ours):
        with warnings.catch_warnings(), pytest.raises(RuntimeError, match="Sizes of tensors must"):
            warnings.simplefilter("ignore")
            each(torch.randn(BATCH + 1, WIDTH))
    x = torch.randn(BATCH + 1, WIDTH)
    for each in (model, ours):
        each.hidden = torch.zeros(BATCH + 1, WIDTH)
    assert_same(ours(x), model(x), "after the user has given it another state")


def test_a_mask_for_another_batch_is_made_and_used() -> None:
    model = made(Masked)
    ours = fusewright.optimize(copy.deepcopy(model), torch.randn(BATCH, WIDTH))
    for rows in (BATCH, BATCH, 6, 6, BATCH):
        x = torch.randn(rows, WIDTH)
        assert_same(ours(x), model(x), f"{rows} rows")
        assert_same(attributes(ours), attributes(model), f"{rows} rows")


def test_two_calls_share_one_state_through_a_submodule() -> None:
    cell = made(Cell)
    whole = nn.Sequential(cell, nn.ReLU())
    ours = fusewright.optimize(whole, torch.randn(BATCH, WIDTH))
    x = torch.randn(BATCH, WIDTH)
    with torch.no_grad():
        ours(x)
        assert next(ours.children()) is cell
        hidden: Any = cell.hidden
        assert bool(hidden.any())
        kept = copy.deepcopy(whole)
        assert_same(ours(x), kept(x), "eager goes on where ours was")
        assert_same(cell.hidden, next(kept.children()).hidden, "")


def test_a_written_tensor_that_is_also_an_argument_runs_the_original() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.zeros(BATCH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.kept.add_(1)
            return x + self.kept

    model = Writing()
    ours = fusewright.optimize(copy.deepcopy(model), torch.randn(BATCH, WIDTH))
    assert_same(ours(torch.ones(BATCH, WIDTH)), model(torch.ones(BATCH, WIDTH)), "")
    with pytest.warns(RuntimeWarning, match="original forward runs: .* changes"):
        assert_same(ours(ours.kept), model(model.kept), "")


def modes_of(model: nn.Module) -> list[Any]:
    found: list[Any] = model.__dict__["_fw_engine"].modes
    return found
