"""The model of `altered_models` as a program and as an emitted file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import fusewright
from fusewright.compile.solution import solve
from fusewright.emit.file import file_text
from tests.support.altered_models import SOURCE, lambdas, made
from tests.support.emitted_files import executed


@pytest.fixture(scope="module")
def program() -> nn.Module:
    model = made()
    model.act = lambdas()[0]
    return fusewright.optimize(model, torch.randn(4, 3), modes=("train",))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], nn.Module]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FUSEWRIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        solution = solve(made(), (torch.randn(4, 3),), modes=("train",))
        names = executed(file_text(solution.bundle, SOURCE, "altered"))

        def new() -> nn.Module:
            torch.manual_seed(0)
            names["_FW_WARNED"].clear()
            model: nn.Module = names["ModelNew"]()
            return model

        yield new
