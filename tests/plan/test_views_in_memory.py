"""Views of memory: their strides are those of their specs, in either layout of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.compile.pipeline import prepare
from fusewright.ir.graph import Dim, Ref
from fusewright.plan.steps import Plan, View
from fusewright.rewrite import layouts
from fusewright.target.target import Target
from tests.support.cuda_on_host import emulated
from tests.support.emulated_modules import as_exact_as_eager, on_library, use_tensor_cores
from tests.support.stubs import stub_convolutions

Between = Callable[[Tensor], Tensor]


class Convolved(nn.Module):
    """Views between two convolutions."""

    def __init__(self, between: Between, channels: int = 32) -> None:
        super().__init__()
        self.between = between
        self.first, self.second = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(channels, 40, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.between(self.first(x))))


BETWEEN: dict[str, tuple[Between, int]] = {
    "smaller": (lambda x: F.avg_pool2d(x, 2), 32),
    "larger": (lambda x: F.interpolate(torch.relu(x), scale_factor=2), 32),
    "rows' means": (lambda x: x.mean(2, keepdim=True), 32),
    "largest": (lambda x: x.amax(3, keepdim=True), 32),
    "a row": (lambda x: x[:, :, 3].unsqueeze(2), 32),
    "shuffled": (lambda x: F.channel_shuffle(x, 4), 32),
    "pixels": (lambda x: F.pixel_shuffle(x, 2), 8),
    "halves": (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), 32),
    "tokens": (
        lambda x: x.flatten(2).transpose(1, 2).softmax(-1).transpose(1, 2).view(x.shape),
        32,
    ),
    "one for all": (lambda x: x[:, :1].expand(-1, 32, -1, -1), 32),
}


def made(name: str, last: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(2, 32, 8, 12).to(memory_format=layout)
    return Convolved(*BETWEEN[name]).to(memory_format=layout), x  # type: ignore[call-overload]


@pytest.mark.sample(3)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("cores", [False, True])
@pytest.mark.parametrize("name", BETWEEN)
def test_views_have_the_strides_of_their_specs(
    name: str, cores: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "LEAST_BYTES", 1)
    if cores:
        use_tensor_cores(monkeypatch)
    model, x = made(name, last)
    found = prepare(model, (x,), modes=("train",), device=x.device, target=Target.cuda())
    for plans in found.modes:
        sizes = plans.program.example_sizes
        for plan in (plans.forward, plans.inference, plans.backward):
            for step in plan.steps if plan is not None else ():
                if plan is not None and isinstance(step, View):
                    assert_lies_so(plan, step, sizes)


def assert_lies_so(plan: Plan, step: View, sizes: Any) -> None:
    specs = dict(plan.specs)
    (source,) = step.node.refs()
    before, after = specs[source], specs[step.name]

    def given(arg: Any) -> Any:
        if isinstance(arg, Ref):
            shape, strides = (
                [each.at(sizes) for each in x] for x in (before.shape, before.strides)
            )
            return torch.empty_strided(shape, strides, device="meta")
        if isinstance(arg, tuple):
            return [given(each) for each in arg]
        return arg.at(sizes) if isinstance(arg, Dim) else arg

    operator = torch.ops.aten
    for word in step.node.op.removeprefix("aten.").split("."):
        operator = getattr(operator, word)
    seen = operator(*map(given, step.node.args), **{k: given(v) for k, v in step.node.kwargs})
    wanted = [each.at(sizes) for each in after.strides]
    places = zip(seen.shape, seen.stride(), wanted, strict=True)
    assert all(size == 1 or real == said for size, real, said in places), step


@pytest.mark.sample(3)
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("name", ["smaller", "larger"])
def test_images_in_channels_last_train_as_in_eager_mode(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_convolutions(monkeypatch)
    use_tensor_cores(monkeypatch)
    model, x = made(name, last=True)
    prepared = prepare(model, (x,), modes=("train",), device=x.device, target=Target.cuda())
    fast = on_library(model, x, prepared, emulated(prepared.source))
    as_exact_as_eager(fast, model, x, 2e-6)
