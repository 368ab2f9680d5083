"""A real call of the model, beside what a trace says of it."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture, memory
from fusewright.capture import witness as real_call
from fusewright.capture.agreement import agreed
from fusewright.capture.witness import Witness, witness
from fusewright.errors import LeftToEagerError, UnguardedError
from tests.support.models import Lambda

X = torch.randn(4, 5)


def seen(model: nn.Module, *args: Any) -> Witness:
    found = witness(model, args, {})
    assert found is not None
    return found


class Everything(nn.Module):
    """Two outputs, a parameter without a gradient, a buffer that changes, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
        self.register_buffer("mean", torch.zeros(5))
        self.drop = nn.Dropout()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        y.zero_()
        return self.drop(x * self.used).t(), (x > 0).long()


def test_what_a_call_did() -> None:
    model, y = Everything(), torch.ones(3, dtype=torch.int64)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    found = seen(model, X, y)
    assert [(each.dtype, each.shape, each.strides) for each in found.outputs] == [
        ("float32", (5, 4), (1, 5)),
        ("int64", (4, 5), (5, 1)),
    ]
    assert [each.differentiable for each in found.outputs] == [True, False]
    assert found.reached == {("parameter", "used"), ("input", "0")}
    assert found.wanted == {("parameter", "used"), ("parameter", "unused")}
    assert found.written == {("buffer", "mean"), ("input", "1")}
    assert found.drew and not seen(model.eval(), X, y).drew
    # Nothing of the user's has changed.
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert not model.mean.any() and bool(y.all())
    assert all(each.grad is None for each in model.parameters())


def test_strides_of_the_arguments_are_kept() -> None:
    """The copies overlap, and have gaps, as the originals do."""
    given = (X.t(), X[:, ::2], X[0].expand(3, 5), torch.empty(0, 3))
    strides: list[tuple[int, ...]] = []

    def noted(*args: Tensor) -> Tensor:
        strides.extend(each.stride() for each in args)
        return args[0] * 2

    seen(Lambda(noted), *given)
    assert strides == [each.stride() for each in given]


def fails(x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("too large")


def test_no_witness_without_memory_or_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = nn.Linear(5, 5)
    assert witness(Lambda(fails), (X,), {}) is None
    assert witness(Lambda(lambda x: holder(x)), (X,), {}) is None
    assert witness(holder, (X,), {}) is not None
    held = sum(each.nbytes for each in (X, *holder.parameters()))
    for free, known in ((3 * held, True), (3 * held - 1, False)):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        assert (witness(holder, (X,), {}) is not None) is known


def test_a_host_tells_its_memory() -> None:
    assert 2**20 < memory.free_bytes(torch.device("cpu")) < 2**62


@pytest.mark.skipif(torch.__version__ < "2.12", reason="its Dynamo guards no enclosed module")
def test_a_model_that_cannot_be_copied_still_gets_kernels() -> None:
    holder = nn.Linear(5, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fast = fusewright.optimize(Lambda(lambda x: holder(x).relu()), (X,), modes=("eval",)).eval()
        torch.testing.assert_close(fast(X), holder(X).relu())


def test_other_threads_may_draw_meanwhile() -> None:
    """Their numbers are not ours, and are not taken back."""

    def disturbed(x: Tensor) -> Tensor:
        other = threading.Thread(target=lambda: torch.rand(3))
        other.start()
        other.join()
        return x * 2

    before = torch.get_rng_state()
    assert not seen(Lambda(disturbed), X).drew
    assert not torch.equal(torch.get_rng_state(), before)


# Differences ----------------------------------------------------------------------------------


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.rand_like(x)


def seeds_alone(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x * 2


def puts_back(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        noise = torch.rand_like(x)
    return x + noise


def puts_back_itself(x: Tensor) -> Tensor:
    state = torch.default_generator.get_state()
    noise = torch.rand_like(x)
    torch.default_generator.set_state(state)
    return x + noise


def draws_in_vain(x: Tensor) -> Tensor:
    torch.rand(3)
    return x * 2


def draws_from_python(x: Tensor) -> Tensor:
    return x * random.random()


@pytest.mark.parametrize(
    "function",
    [seeds, seeds_alone, puts_back, puts_back_itself, draws_in_vain, draws_from_python],
)
def test_generators_are_left_as_eager_leaves_them(function: Callable[[Tensor], Tensor]) -> None:
    model = Lambda(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        fast = fusewright.optimize(model, (X,))
    states = []
    for each in (model, fast):
        torch.manual_seed(77)
        random.seed(77)
        results = [each(X), each(X)]
        states.append((*results, torch.get_rng_state(), torch.tensor(random.getstate()[1])))
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)


@torch.library.custom_op(
    "tests_witness::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def noisy(x: Tensor, p: float) -> Tensor:
    return x + torch.rand_like(x) if p else x + 1


@noisy.register_fake
def _(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_operators_that_draw_only_if_their_arguments_say_so(p: float) -> None:
    """PyTorch's attention on a GPU is one: it draws for dropout alone."""
    model = Lambda(lambda x: noisy(x, p) * 2)
    assert seen(model, X).drew == bool(p)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fast = fusewright.optimize(model, (X,))
        torch.manual_seed(5)
        expected = model(X)
        torch.manual_seed(5)
        assert torch.equal(fast(X), expected)


def test_draws_of_numpy_are_refused() -> None:
    with pytest.raises(UnguardedError, match=r"numpy\.random"):
        witness(Lambda(lambda x: x * float(np.random.rand())), (X,), {})


def test_a_wrong_shape_of_pytorchs_trace() -> None:
    model = nn.MultiMarginLoss(reduction="none")
    x, target = torch.randn(5), torch.tensor(2)
    with pytest.warns(RuntimeWarning, match=r"float32\[\] with .*trace says float32\[1\]"):
        fast = fusewright.optimize(model, (x, target))
    assert fast(x, target).shape == ()


def test_a_gradient_that_the_trace_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.15 keeps it, or says that it cannot. Without gradients, kernels still run."""
    monkeypatch.setattr(real_call, "_Layouts", contextlib.nullcontext)
    model = Lambda(lambda x: x.to_sparse().to_dense() * 2)
    lost = pytest.warns(RuntimeWarning, match="a real backward reaches the argument 0")
    with lost if torch.__version__ < "2.14" else contextlib.nullcontext():
        fast = fusewright.optimize(model, (X,), modes=("train",))
    x = X.clone().requires_grad_()
    (found,) = torch.autograd.grad(fast(x).sum(), x)
    assert torch.equal(found, torch.full_like(X, 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fast(X), X * 2)


CHANGED: dict[str, Callable[[Witness], Witness]] = {
    "changes the buffer mean": lambda w: replace(w, written=w.written | {("buffer", "mean")}),
    "returns 1 tensors": lambda w: replace(w, outputs=w.outputs[:1]),
    "draws random numbers": lambda w: replace(w, drew=True),
    "strides": lambda w: replace(
        w, outputs=(replace(w.outputs[0], strides=(4, 1), copied=(4, 1)), *w.outputs[1:])
    ),
    "is on cuda, and PyTorch's trace says cpu": lambda w: replace(
        w, outputs=(replace(w.outputs[0], device="cuda"), *w.outputs[1:])
    ),
}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * self.weight).t(), x + self.mean


@pytest.mark.parametrize("words", CHANGED)
def test_other_differences_are_refused(words: str) -> None:
    model = Plain()
    program, real = capture(model, (X,), mode="train"), seen(model, X)
    assert agreed((program,), real) == (program,)
    with pytest.raises(LeftToEagerError, match=words):
        agreed((program,), CHANGED[words](real))


def test_a_gradient_that_only_the_trace_has() -> None:
    """It matters for tensors that require gradients in the example."""
    model = Plain()
    program, real = capture(model, (X,), mode="train"), seen(model, X)
    assert real.reached is not None
    without = replace(real, reached=real.reached - {("input", "0")})
    assert agreed((program,), without) == (program,)
    without = replace(real, reached=real.reached - {("parameter", "weight")})
    (found,) = agreed((program,), without)
    assert found.backward is None and "the parameter weight" in found.forward_only
