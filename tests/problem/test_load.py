"""Problem files: the right ones load, and each mistake is named with its file and line."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fusewright.errors import ProblemError
from fusewright.problem.load import (
    candidate_factory,
    load_problem,
)
from tests.support.live_problems import problem_from_module

GOOD = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 2)

    def forward(self, x):
        return self.linear(x)


def get_inputs():
    return [torch.randn(3, 4)]


def get_init_inputs():
    return [4]
"""


def write(folder: Path, text: str, name: str = "problem.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_good_file_loads(tmp_path: Path) -> None:
    problem = load_problem(write(tmp_path, GOOD))
    assert (problem.name, problem.path) == ("problem", tmp_path / "problem.py")
    assert problem.source == GOOD
    model = problem.make_model()
    (x,) = problem.make_inputs()
    assert isinstance(x, torch.Tensor)
    torch.testing.assert_close(model(x), x @ model.linear.weight.T + model.linear.bias)
    assert not torch.equal(x, problem.make_inputs()[0])


def test_named_constructor_arguments(tmp_path: Path) -> None:
    problem = load_problem(write(tmp_path, GOOD.replace("return [4]", "return {'width': 4}")))
    assert problem.make_init().named == (("width", 4),)
    assert problem.make_model().linear.weight.shape == (2, 4)


def test_two_files_of_one_name_are_separate_and_models_pickle(tmp_path: Path) -> None:
    one = load_problem(write(tmp_path, GOOD))
    two = load_problem(write(tmp_path, GOOD.replace("self.linear(x)", "-self.linear(x)")))
    x = torch.ones(1, 4)
    for problem, sign in ((one, 1), (two, -1)):
        model = problem.make_model()
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(again(x), model(x))
        assert torch.equal(again(x), sign * model.linear(x))


def test_a_dataclass_and_a_neighbour_can_be_used(tmp_path: Path) -> None:
    write(tmp_path, "WIDTH = 4\n", "neighbour_of_problem.py")
    head = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour_of_problem import WIDTH\n@dataclass\nclass Size:\n    n: int = WIDTH\n"
    )
    text = head + GOOD.replace("return [4]", "return [Size().n]")
    assert load_problem(write(tmp_path, text)).make_model().linear.weight.shape == (2, 4)


MISTAKES = {
    "syntax": (GOOD.replace("class Model", "clas Model"), 5, "SyntaxError"),
    "import": ("import torch\nimport no_such_thing\n", 2, "No module named 'no_such_thing'"),
    "raises": (GOOD + "\n1 / 0\n", 21, "ZeroDivisionError"),
    "exits": (GOOD + "\nraise SystemExit(3)\n", 21, "SystemExit: 3"),
    "no Model": (GOOD.replace("class Model", "class Net"), 1, "no class Model.*it has Net"),
    "no module": (GOOD.replace("Model(nn.Module)", "Model"), 5, "Model is not an nn.Module"),
    "no get_inputs": (GOOD.replace("get_inputs", "inputs"), 1, r"no function get_inputs\(\)"),
    "get_inputs no function": (GOOD + "\nget_inputs = 3\n", 14, "not a function: get_inputs"),
    "no get_init_inputs": (GOOD.replace("get_init_", "init_"), 1, "no function get_init_inputs"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_file_is_named_with_its_line(mistake: str, tmp_path: Path) -> None:
    text, line, words = MISTAKES[mistake]
    path = write(tmp_path, text)
    with pytest.raises(ProblemError, match=f"^{re.escape(str(path))}:{line}: .*{words}"):
        load_problem(path)


LATE_MISTAKES = {
    "constructor": ("nn.Linear(width, 2)", "nn.Linear(width, -2)", 8, "negative dimension"),
    "arguments": ("return [4]", "return [4, 5]", 5, "positional arguments.*returns 2 arguments"),
    "init inputs fail": ("return [4]", "return [4 / 0]", 19, "division by zero"),
    "init inputs no list": ("return [4]", "return 4", 18, "returns a int: return a list"),
    "inputs fail": ("torch.randn(3, 4)", "torch.randn('x')", 15, r"get_inputs\(\) failed"),
    "inputs no list": ("[torch.randn(3, 4)]", "torch.randn(3, 4)", 14, "returns a Tensor"),
}


@pytest.mark.parametrize("mistake", LATE_MISTAKES)
def test_a_mistake_found_in_use_is_named_with_its_line(mistake: str, tmp_path: Path) -> None:
    old, new, line, words = LATE_MISTAKES[mistake]
    path = write(tmp_path, GOOD.replace(old, new))
    problem = load_problem(path)
    with pytest.raises(ProblemError, match=rf"(?s)^{re.escape(str(path))}:{line}: .*{words}"):
        problem.make_inputs()
        problem.make_model()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"gone\.py: there is no such file"):
        load_problem(tmp_path / "gone.py")


def test_candidates_load_and_are_made_like_the_model(tmp_path: Path) -> None:
    problem = load_problem(write(tmp_path, GOOD))
    path = write(tmp_path, GOOD + "\nclass ModelNew(Model):\n    answer = 42\n", "new.py")
    made = candidate_factory(path, problem)()
    assert type(made).__name__ == "ModelNew" and made.answer == 42
    assert made.linear.weight.shape == (2, 4)
    with pytest.raises(ProblemError, match="no class ModelNew"):
        candidate_factory(tmp_path / "problem.py", problem)


def test_a_live_module_keeps_its_values_and_moves_its_inputs() -> None:
    module = nn.Linear(3, 2)
    x, index = torch.arange(12.0).reshape(3, 4).t(), torch.tensor([2, 0])
    problem = problem_from_module(module, (x, index))
    made = problem.make_model()
    assert made is not module
    assert torch.equal(made.weight, module.weight)
    fresh, same = problem.make_inputs()
    assert isinstance(fresh, torch.Tensor)
    assert fresh.stride() == x.stride()
    assert not torch.equal(fresh, x)
    assert torch.equal(fresh.flatten().sort().values, x.flatten().sort().values)
    assert same is index


def test_the_reference_problems_compute_what_they_say(examples: tuple[Path, ...]) -> None:
    formulas = {
        "conv2d_min_add_multiply": lambda m, x: (m.conv(x).minimum(torch.tensor(0.5)) + m.bias) * 2,
        "gemm_add_relu": lambda m, x: (x @ m.gemm.weight.T + m.bias).clamp(min=0),
        "matmul_batchnorm_bias_divide_swish": lambda m, x: nn.functional.silu(
            (m.bn(m.matmul(x)) + m.bias) / 2
        ),
        "matmul_min_subtract": lambda m, x: (m.linear(x) - m.constant).clamp(max=0),
    }
    assert [path.stem for path in examples] == sorted(formulas)
    for path in examples:
        problem = load_problem(path)
        model = problem.make_model().eval()
        (x,) = problem.make_inputs()
        expected = formulas[path.stem](model, x)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
