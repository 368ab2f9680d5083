"""Results share memory with arguments, parameters, buffers and each other as in eager mode."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusewright


class Inputs(nn.Module):
    """Returns what it was given and what it holds, and views of these."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)
        self.register_buffer("table", torch.rand(6))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        y = (x * self.weight).sin()
        held = (self.weight, self.weight[1:], self.table, self.table[2:4], mask)
        return (x, y, x.view(-1), x.t(), x[1:], x.detach(), x.expand(3, *x.shape), *held)


class Chunks(nn.Module):
    """Returns parts of a value that it does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.linear(x).tanh().chunk(3, -1))


class Same(nn.Module):
    """Returns a value several times, and views of it."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x.sin()
        return {"y": y, "again": y, "row": y[0], "turned": y.t(), "apart": y.detach()}


class Lone(nn.Module):
    """A view of a value that nobody else sees."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 3)[:, 1:]


class Twice(nn.Module):
    """A view that is returned twice, without the value that it is a view of."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin().t()
        return y, y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.relu(self.two(x)), self.two.weight, self.one.weight.t()


class Counts(nn.Module):
    """Changes a buffer in place and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        return self.calls, self.calls[1], x * self.calls.sum()


class Onward(nn.Module):
    """Only a view of its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1)


CASES = {
    "inputs": (Inputs, 2),
    "chunks": (Chunks, 1),
    "same": (Same, 1),
    "lone": (Lone, 1),
    "twice": (Twice, 1),
    "tied": (Tied, 1),
    "counts": (Counts, 1),
    "onward": (Onward, 1),
}


def made(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A model and a copy of it."""
    torch.manual_seed(0)
    model = kind()
    return model, copy.deepcopy(model)


def arguments(count: int, rows: int, gradients: bool) -> list[Tensor]:
    torch.manual_seed(rows)
    given = [torch.randn(rows, 4).requires_grad_(gradients), torch.rand(rows) > 0.5]
    return given[:count]


def listed(result: object) -> list[Tensor]:
    if isinstance(result, dict):
        return [*result.values()]
    return [*result] if isinstance(result, tuple) else [result]


def memory(model: nn.Module, given: list[Tensor], results: list[Tensor]) -> list[tuple]:
    """For each result: the first tensor that it is, the first whose memory it has, its layout."""
    known = [*given, *model.parameters(), *model.buffers(), *results]
    homes = [each.untyped_storage().data_ptr() for each in known]
    names = [*map(id, known)]
    return [
        (
            names.index(id(each)),
            homes.index(each.untyped_storage().data_ptr()),
            (tuple(each.shape), each.stride(), each.storage_offset(), each.requires_grad),
        )
        for each in results
    ]


def gradients_of(model: nn.Module, given: list[Tensor], results: list[Tensor]) -> list[object]:
    ends = [(at + 1) * each.square().sum() for at, each in enumerate(results) if each.requires_grad]
    leaves = [each for each in (*given, *model.parameters()) if each.requires_grad]
    return [*torch.autograd.grad(sum(ends), leaves, allow_unused=True)] if ends else []


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_memory_values_and_gradients_are_those_of_eager_mode(name: str, gradients: bool) -> None:
    kind, count = CASES[name]
    eager, model = made(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fast = fusewright.optimize(model, tuple(arguments(count, 3, gradients)))
        for rows, enabled in ((3, True), (5, True), (5, False)):
            seen = []
            for each in (eager, fast):
                given = arguments(count, rows, gradients)
                with torch.set_grad_enabled(enabled):
                    results = listed(each(*given))
                grads = gradients_of(each, given, results) if enabled else []
                seen.append((memory(each, given, results), [*results, *grads]))
            (there, wanted), (here, found) = seen
            assert here == there
            for one, other in zip(found, wanted, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_result_changed_in_place_changes_its_views_and_their_gradients() -> None:
    eager, model = made(Same)
    fast = fusewright.optimize(model, torch.randn(3, 4))
    seen = []
    for each in (eager, fast):
        x = arguments(1, 3, gradients=True)[0]
        found = each(x)
        found["row"].mul_(2)
        (gradient,) = torch.autograd.grad(found["turned"].square().sum(), x)
        seen.append([found["y"], found["turned"], found["again"], gradient])
    torch.testing.assert_close(*seen)


class Offsets(nn.Module):
    """Views that begin behind their bases."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        one, two = (x @ self.weight).tanh().chunk(2, -1)
        return one, two, two.t()[1:], two[:, 2:], x[1:, 2:], self.weight[1:]


class Held(nn.Module):
    """Views of tensors that are there already; nothing is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.weight.t(), x[1:], x


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", [Offsets, Held, Same])
def test_a_graph_of_torch_compile_returns_views(kind: type[nn.Module], gradients: bool) -> None:
    torch._dynamo.reset()
    eager, model = made(kind)
    fast = fusewright.optimize(model, arguments(1, 3, gradients)[0])
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        seen = []
        for each in (eager, compiled):
            given = arguments(1, rows, gradients)
            results = listed(each(*given))
            seen.append([*results, *gradients_of(each, given, results)])
        torch.testing.assert_close(*seen, rtol=1e-5, atol=1e-6)


def test_an_emitted_file_returns_the_same_memory(tmp_path: Path) -> None:
    eager, model = made(Inputs)
    fast = fusewright.optimize(model, tuple(arguments(2, 3, True)))
    path = tmp_path / "inputs_new.py"
    fusewright.save(fast, path)
    space: dict[str, object] = {"__name__": "inputs_new"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    new = space["ModelNew"]
    assert isinstance(new, type)
    other = new()
    other.load_state_dict(eager.state_dict())
    for rows in (3, 4):
        given = arguments(2, rows, True)
        assert memory(other, given, listed(other(*given))) == memory(
            eager, given, listed(eager(*given))
        )


class Reversed(torch.autograd.Function):
    """The same memory, another gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return -gradient


class Adversary(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.cos()
        return y, Reversed.apply(y)


def test_a_function_of_the_user_keeps_its_gradient() -> None:
    eager, model = made(Adversary)
    fast = fusewright.optimize(model, torch.randn(3, 4))
    seen = []
    for each in (eager, fast):
        x = arguments(1, 3, gradients=True)[0]
        one, other = each(x)
        seen.append(torch.autograd.grad((one + 3 * other).sum(), x))
    torch.testing.assert_close(*seen)


class Views(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[1:], x.t(), x * 2


@pytest.mark.parametrize("steps", [(0, 1), (1, 1), (1, 0)])
def test_gradients_of_an_argument_whose_elements_share_memory(steps: tuple[int, int]) -> None:
    """The gradient of `as_strided` is another one there: it is divided among such elements."""
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        example = torch.randn(12).as_strided((3, 4), steps)
        fast = fusewright.optimize(Views(), example, check=False)
        for each in (Views(), fast):
            torch.manual_seed(0)
            x = torch.randn(12).as_strided((3, 4), steps).requires_grad_()
            seen.append(gradients_of(each, [x], listed(each(x))))
    torch.testing.assert_close(*seen)


class Mixed(nn.Module):
    """Views that we cannot form beside others that we can."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        return y, y.detach().view(torch.int32), y[0], x.detach().view(torch.int32), x[1:]


def test_a_view_that_is_copied_leaves_the_others_as_they_are() -> None:
    fast, x = fusewright.optimize(Mixed(), torch.randn(3, 4)), torch.randn(3, 4)
    found = listed(fast(x))
    torch.testing.assert_close(found, listed(Mixed()(x)))
    known = [each.untyped_storage().data_ptr() for each in (x, *found)]
    assert known[1] == known[3] and known[0] == known[5] and len({*known}) == 4
