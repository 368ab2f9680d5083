"""What changes between calls: nothing of one follows from another."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusewright.judge.expectations import Expectations
from fusewright.judge.script import (
    SPLITS,
    Step,
    altered,
    denormal,
    has_numbers,
    script,
    strided,
    with_zeros,
)
from fusewright.judge.variety import halves, shrunk
from fusewright.problem.inputs import SPACED
from fusewright.problem.load import load_problem

FOLDER = Path(__file__).parent / "candidates"


@pytest.fixture(autouse=True)
def _same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


def expectations(name: str) -> Expectations:
    problem = load_problem(FOLDER / f"{name}.py")
    return Expectations(problem, ("train", "eval"), 11, torch.device("cpu"))


def is_multiple(one: torch.Tensor, other: torch.Tensor) -> bool:
    share = one / other
    return bool(torch.allclose(share, share.flatten()[0].expand_as(share), rtol=1e-5))


def test_inputs_that_are_always_the_same_differ_by_more_than_a_factor() -> None:
    given = (torch.ones(6, 5), [torch.full((7,), 2.0)], torch.arange(3), "words", torch.tensor(4.0))
    first, second = shrunk(given), shrunk(given)
    for one, other in ((first[0], second[0]), (first[1][0], second[1][0])):  # type: ignore[index]
        assert not is_multiple(one, other)
        assert bool((one <= 2.0).all()) and bool((one >= 0.7).all())
    assert torch.equal(first[2], given[2]) and first[3] == "words"  # type: ignore[arg-type]
    assert 3.0 <= float(first[4]) < 4.0  # type: ignore[arg-type]


def test_a_symmetric_matrix_stays_symmetric_and_positive() -> None:
    root = torch.randn(9, 9)
    (found,) = shrunk((root @ root.t() + torch.eye(9),))
    assert torch.allclose(found, found.t())  # type: ignore[arg-type, union-attr]
    torch.linalg.cholesky(found)


def test_each_call_has_other_gradients_and_no_seed_that_follows() -> None:
    mine = expectations("small")
    asked = [mine.asked(Step(gradients=True))[0].expected.question for _ in range(6)]
    asked += mine.questions(Step(gradients=True, sets=3))
    gradients = [each.tangents["output"] for each in asked]
    for index, one in enumerate(gradients):
        assert not any(is_multiple(one, other) for other in gradients[:index])
    seeds = sorted(each.seed for each in asked)
    assert all(after - before > 9 for before, after in itertools.pairwise(seeds))
    sizes = [float(each.abs().mean()) for each in gradients]
    assert max(sizes) > 3 * min(sizes), "some are unusually large or small"


def test_large_inputs_and_gradients_are_made_from_others_and_differ() -> None:
    mine = expectations("small")
    many = torch.randn(1 << 18, 16)
    one, other = (shrunk((many,))[0] for _ in range(2))
    assert not is_multiple(one, other)  # type: ignore[arg-type]
    reference = mine.references["train"]
    reference.tangents = {"output": many}
    mine._gradients["train"].renew(random.Random(1))
    assert not is_multiple(reference.tangents["output"], many)


def test_statistics_move_as_in_training_and_weights_stay() -> None:
    mine = expectations("norm")
    before, weights = dict(mine.references["eval"].buffers), mine.weights()
    mine.train_once()
    after = mine.references["eval"].buffers
    assert mine.weights() == weights
    assert not torch.equal(before["norm.running_mean"], after["norm.running_mean"])
    assert int(after["norm.num_batches_tracked"]) == int(before["norm.num_batches_tracked"]) + 1
    asked = mine.asked(Step(mode="eval"))[0].expected.question
    assert torch.equal(asked.buffers["norm.running_var"], after["norm.running_var"])


def test_every_second_step_leaves_the_first_and_the_last_weight() -> None:
    mine = expectations("small")
    weight = mine.model.get_parameter("linear.weight")
    left = 0
    for _ in range(6):
        before = weight.detach().clone()
        mine.new_weights()
        same = weight.detach() == before
        assert not bool(same.all())
        left += bool(same[0, 0]) and bool(same[-1, -1])
        assert not bool(mine.model.get_parameter("limit").isnan())
    assert left == 3


def test_calls_that_follow_come_after_a_plain_one() -> None:
    steps = script(random.Random(4))
    for before, step in itertools.pairwise(steps):
        if step.follows:
            assert before == Step(mode=step.mode, gradients=step.gradients)
    assert sum(bool(each.follows) for each in steps) > 8


def test_a_part_runs_in_the_other_mode_and_goes_back() -> None:
    mine = expectations("norm")
    step = Step("a part in another mode", mode="train", part="*")
    assert mine.applies(step)
    (asked,) = mine.asked(step)
    assert asked.step.part == "norm"
    buffers = asked.expected.question.buffers
    found = asked.expected.eager["contiguous"]
    mean = found["buffer norm.running_mean"]
    assert torch.equal(mean, buffers["norm.running_mean"])  # type: ignore[arg-type]
    mine.model.train()
    assert mine.model.get_submodule("norm").training
    assert not expectations("small").applies(step), "there is no part with modes"


def test_altered_inputs() -> None:
    values = torch.randn(8, 40) + 5.0
    zeros = with_zeros(values)
    rows = (zeros == 0).all(dim=1)
    assert int(rows.sum()) == 1 and int((zeros == 0).sum()) > 40
    tiny = denormal(values)
    assert 0 < float(tiny.abs().max()) < torch.finfo(torch.float32).tiny


def test_of_two_names_each_is_once_in_a_part_without_the_other() -> None:
    names = [f"n{number}" for number in range(7)]
    parts = halves(names, 6, random.Random(3))
    for one, other in itertools.permutations(names, 2):
        assert any(one in part and other not in part for part in parts)
    assert halves(["x0", "weight"], 6, random.Random(3)).count(()) == 4
    assert not any(halves(["x0"], 6, random.Random(3)))


def test_some_take_gradients_and_others_do_not() -> None:
    mine = expectations("instance")
    left = []
    for step in (Step(gradients=True, split=number) for number in range(1, SPLITS + 1)):
        assert mine.applies(step)
        (asked,) = mine.asked(step)
        found = asked.expected.eager["contiguous"]
        gradients = {name for name in found if name.startswith("grad ")}
        assert gradients and not gradients & {f"grad {name}" for name in asked.step.fixed}
        assert len(gradients) + len(asked.step.fixed) == 5
        left += gradients
    assert set(left) == {f"grad {n}" for n in ("x0", "x1", "bias", "norm.weight", "norm.bias")}
    assert all(each.requires_grad for each in mine.model.parameters())


def test_rows_apart_and_channels_last() -> None:
    x = torch.randn(4, 3, 6, 5)
    spaced = strided(x, SPACED)
    assert torch.equal(spaced, x) and spaced.stride() == (3 * 6 * 8, 6 * 8, 8, 1)
    found = {strided(x, "transposed").stride() for _ in range(30)}
    assert found == {(1, 4, 12, 72), (90, 1, 15, 3)}
    assert strided(x[0, 0, 0], SPACED).stride() == (2,)


def test_other_numbers_stand_for_numbers_only() -> None:
    step, x = Step(numbers=True), torch.ones(2)
    assert altered(step, x) is x and altered(step, 3) == 3 and altered(step, "a") == "a"
    assert all(1.0 <= altered(step, 2.0) < 2.0 for _ in range(9))  # type: ignore[operator]
    assert {altered(step, True) for _ in range(40)} == {True, False}
    assert has_numbers((x, {"p": 0.5})) and not has_numbers((x, 3, "a", None))
