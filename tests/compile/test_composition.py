"""Optimized modules inside the rest of PyTorch: eager's values and gradients, or eager itself with
one warning."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.support.composed import ROUTES, eager, example, ours, train, weigh

# What is done with a model, and with what runs it.
Use = Callable[[nn.Module, Callable[..., Any]], Any]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def agrees(use: Use, route: str, words: str = "") -> None:
    """Ours gives eager's results. With `words`, the original forward runs, and one warning says
    why."""
    model = eager(route)
    wanted = use(model, model)
    model, run = ours(route)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = use(model, run)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    said = [str(each.message) for each in caught if each.category is RuntimeWarning]
    if route == "torch.compile":  # PyTorch's own front end: it decides what our graphs are
        assert said == []
    elif words:
        assert len(said) == 1 and said[0].startswith("the original forward runs: ")
        assert words in said[0]
    else:
        assert said == []


def _saves_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in matmuls else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(**settings: Any) -> Use:
    return lambda model, run: train(model, lambda x: checkpoint(run, x, **settings))


def _parameters(model: nn.Module, run: Any) -> dict[str, Tensor]:
    """Copies of the parameters, under the names that `functional_call(run, ...)` takes."""
    names = {id(p): name for name, p in run.named_parameters()}
    return {names[id(p)]: p.detach().clone() for p in model.parameters()}


def _called_with_others(model: nn.Module, run: Any) -> Any:
    given = {name: (1.5 * each).requires_grad_() for name, each in _parameters(model, run).items()}
    y = functional_call(run, given, (example(),))
    return [y, *torch.autograd.grad(weigh(y), list(given.values())), run(example())]


def _sample_gradients(model: nn.Module, run: Any) -> Any:
    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return weigh(functional_call(run, given, (x[None],)))

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(_parameters(model, run), example())
    return list(found.values())


def _dual_parameters(model: nn.Module, run: Any) -> Any:
    duals = torch.autograd.forward_ad
    run(example())
    with duals.dual_level():
        given = _parameters(model, run)
        given = {n: duals.make_dual(p, torch.ones_like(p)) for n, p in given.items()}
        return list(duals.unpack_dual(functional_call(run, given, (example(),))))


TRANSFORM = "a torch.func transform is active"
DUALS = "forward-mode differentiation is active"
TRANSFORMS: dict[str, tuple[Use, str]] = {
    "functional_call": (_called_with_others, ""),
    "vmap": (lambda m, run: torch.func.vmap(run)(example().reshape(2, 2, -1)), TRANSFORM),
    "jvp": (
        lambda m, run: list(torch.func.jvp(run, (example(),), (example(seed=1),))),
        TRANSFORM,
    ),
    "grad": (lambda m, run: torch.func.grad(lambda x: weigh(run(x)))(example()), TRANSFORM),
    "jacrev": (lambda m, run: torch.func.jacrev(run)(example()), TRANSFORM),
    "gradients of each sample": (_sample_gradients, TRANSFORM),
    "dual parameters": (_dual_parameters, DUALS),
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, route: str) -> None:
    agrees(TRANSFORMS[name][0], route, TRANSFORMS[name][1])


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, _saves_matmuls)
CHECKPOINTS: dict[str, tuple[Use, str]] = {
    "reentrant": (_checkpointed(use_reentrant=True), ""),
    "not reentrant": (_checkpointed(use_reentrant=False), ""),
    "selective": (
        _checkpointed(use_reentrant=False, context_fn=SELECTIVE),
        "a dispatch mode is active",
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_activation_checkpoints(name: str, route: str) -> None:
    agrees(CHECKPOINTS[name][0], route, CHECKPOINTS[name][1])


# Registers a hook on the model, or on what runs it. The hook notes what it sees in a list.
Register = Callable[[Any, Any, list[Any]], Any]


def _noting(seen: list[Any], value: Any, result: Any = None) -> Any:
    seen.append(value.detach().clone())
    return result


HOOKS: dict[str, Register] = {
    "forward": lambda model, run, seen: run.register_forward_hook(
        lambda _, args, y: _noting(seen, y, 2 * y)
    ),
    "forward pre": lambda model, run, seen: run.register_forward_pre_hook(
        lambda _, args: _noting(seen, args[0], (2 * args[0],))
    ),
    "backward pre": lambda model, run, seen: run.register_full_backward_pre_hook(
        lambda _, tangents: _noting(seen, tangents[0], (2 * tangents[0],))
    ),
    "of a parameter": lambda model, run, seen: model.a.up.weight.register_hook(
        lambda gradient: _noting(seen, gradient, 2 * gradient)
    ),
    "after accumulation": lambda model, run, seen: (
        model.a.up.weight.register_post_accumulate_grad_hook(lambda p: _noting(seen, p.grad))
    ),
}
# torch.compile does not see these if they are registered after the first call.
HOOKS_THAT_DYNAMO_MISSES: dict[str, Register] = {
    "backward": lambda model, run, seen: run.register_full_backward_hook(
        lambda _, gradients, tangents: _noting(seen, tangents[0])
    ),
    "forward of a submodule": lambda model, run, seen: model.a.up.register_forward_hook(
        lambda _, args, y: _noting(seen, y, 2 * y)
    ),
    "forward pre of a submodule": lambda model, run, seen: model.a.up.register_forward_pre_hook(
        lambda _, args: _noting(seen, args[0], (2 * args[0],))
    ),
    "backward of a submodule": lambda model, run, seen: model.a.up.register_full_backward_hook(
        lambda _, gradients, tangents: _noting(seen, tangents[0], (2 * gradients[0],))
    ),
}


def _hooked(register: Register) -> Use:
    """Training steps without, with and without the hook."""

    def use(model: nn.Module, run: Callable[..., Any]) -> Any:
        seen: list[Any] = []
        found = [train(model, run)]
        hook = register(model, run, seen)
        found.append(train(model, run))
        hook.remove()
        return [*found, train(model, run), seen]

    return use


@pytest.mark.sample(7)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name: str, route: str) -> None:
    agrees(_hooked(HOOKS[name]), route)


@pytest.mark.sample(5)
@pytest.mark.parametrize("route", ["programs", "dynamo"])
@pytest.mark.parametrize("name", HOOKS_THAT_DYNAMO_MISSES)
def test_hooks_that_dynamo_misses(name: str, route: str) -> None:
    words = "hooks of a.up must see its calls" if "submodule" in name else ""
    agrees(_hooked(HOOKS_THAT_DYNAMO_MISSES[name]), route, words)


class LowRank(nn.Module):
    """A linear layer with a correction of rank two."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        one, other = example(2), example(layer.out_features, 1)[:, :2]
        self.down, self.up = nn.Parameter(one), nn.Parameter(other.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + x @ self.down.T @ self.up.T
        return y


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def _low_rank(model: Any, run: Any) -> Iterator[Any]:
    model.a.up = LowRank(model.a.up)
    yield train(model, run)
    model.a.up.layer.requires_grad_(False)
    yield train(model, run)
    model.a.up = model.a.up.layer
    yield train(model, run)


def _parametrized(model: Any, run: Any) -> Iterator[Any]:
    parametrize.register_parametrization(model.a.up, "weight", Doubled())
    yield train(model, run)
    parametrize.remove_parametrizations(model.a.up, "weight")
    yield train(model, run)


def _pruned(model: Any, run: Any) -> Iterator[Any]:
    prune.l1_unstructured(model.a.up, "weight", 0.5)
    yield train(model, run)
    model.a.up.weight_mask.zero_()
    yield train(model, run)
    prune.remove(model.a.up, "weight")
    yield train(model, run)


def _weight_norm(model: Any, run: Any) -> Iterator[Any]:
    parametrizations.weight_norm(model.a.up)
    yield train(model, run)
    parametrize.remove_parametrizations(model.a.up, "weight")
    yield train(model, run)


def _frozen(model: Any, run: Any) -> Iterator[Any]:
    for wanted in (False, True):
        model.a.requires_grad_(wanted)
        yield train(model, run)


def _averaged(model: Any, run: Any) -> Iterator[Any]:
    average = AveragedModel(run, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    descent = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        yield train(model, run)
        descent.step()
        average.update_parameters(run)
        yield average(example()).detach()


def _copied(model: Any, run: Any) -> Iterator[Any]:
    twin = copy.deepcopy(run)
    with torch.no_grad():
        for each in twin.parameters():
            each.mul_(1.1)
    yield train(twin, twin)
    yield train(model, run)


def _stored(model: Any, run: Any) -> Iterator[Any]:
    twin = pickle.loads(pickle.dumps(run))
    yield train(twin, twin)
    buffer = io.BytesIO()
    torch.save(run, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    yield train(twin, twin)


def _loaded(model: Any, run: Any) -> Iterator[Any]:
    for assign in (False, True):
        state = {name: 1.2 * each for name, each in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        yield train(model, run)


def _cast(model: Any, run: Any) -> Iterator[Any]:
    yield train(model.double(), run, example().double())
    yield train(model.float(), run)


def _from_meta(model: Any, run: Any) -> Iterator[Any]:
    state = {name: each.clone() for name, each in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    yield train(model, run)


CHANGES = {
    "low-rank layers": _low_rank,
    "parametrize": _parametrized,
    "prune": _pruned,
    "weight norm": _weight_norm,
    "frozen parts": _frozen,
    "moving average": _averaged,
    "deepcopy": _copied,
    "pickle": _stored,
    "state dict": _loaded,
    "dtype": _cast,
    "meta device": _from_meta,
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", CHANGES)
def test_changed_models(name: str, route: str) -> None:
    agrees(lambda model, run: [train(model, run), *CHANGES[name](model, run)], route)


@pytest.mark.parametrize("route", ["programs", "dynamo"])  # PyTorch exports no compiled module
@pytest.mark.parametrize("strict", [True, False])
def test_export_with_named_sizes(strict: bool, route: str) -> None:
    def use(model: nn.Module, run: Any) -> Any:
        sizes = {"x": {0: Dim("batch", min=2)}}
        made = torch.export.export(run, (example(),), dynamic_shapes=sizes, strict=strict).module()
        return [made(example()), made(example(7))]

    agrees(use, route)


@pytest.mark.parametrize("route", ["programs", "dynamo"])
def test_symbolic_trace(route: str) -> None:
    def use(model: nn.Module, run: Any) -> Any:
        return torch.fx.symbolic_trace(run)(example())

    agrees(use, route, "torch.fx.symbolic_trace is active")


@pytest.mark.parametrize("route", ["programs", "dynamo"])
def test_jit_trace(route: str) -> None:
    def use(model: nn.Module, run: Any) -> Any:
        return torch.jit.trace(run.eval(), example(), check_trace=False)(example(6))

    agrees(use, route, "torch.jit.trace is active")
