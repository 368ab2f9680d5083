"""GPUs that differ in their number of processors are planned apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import nn

from fusewright.compile.pipeline import prepare
from fusewright.cost.convolution import gradient_pays, is_worthwhile, our_us, prefers_shared
from fusewright.cost.matmul import best_tile_rows, best_us, pytorch_us
from fusewright.ir.convolution import ConvAxis, Geometry, by_eight
from fusewright.ir.graph import Dim
from fusewright.ir.matmul import Extents
from fusewright.plan import prologues, staged_pairs
from fusewright.target.facts import H200
from fusewright.target.target import Target

T = TypeVar("T")
COUNTS = (114, 132, 144)
TARGETS = {count: Target.cuda(replace(H200, sms=count)) for count in COUNTS}


def on_each(ask: Callable[[Target], T]) -> tuple[T, ...]:
    return tuple(ask(TARGETS[count]) for count in COUNTS)


def convolution(images: int, size: int, channels: int, results: int) -> Geometry:
    axis = ConvAxis(size, size, 3, 1, 1, 1)
    return Geometry(Dim(images), 1, channels, results, axis, axis)


def test_costs_follow_the_count() -> None:
    """12 × 12 tiles of 128 are one wave of 144 processors, and two of fewer."""
    of = Extents(1536, 1536, 1024)
    assert on_each(lambda target: best_tile_rows(of, target)) == (176, 176, 128)
    assert best_us(of, TARGETS[144]) < best_us(of, TARGETS[132]) == best_us(of, TARGETS[114])
    large = Extents(8192, 8192, 8192)
    for ask in (best_us, pytorch_us):
        fewer, same, more = on_each(lambda target, ask=ask: ask(large, target))  # type: ignore[misc]
        assert fewer > same > more
    of = convolution(64, 56, 64, 64)
    fewer, same, more = on_each(lambda target: our_us(of, by_eight(of), {}, target, False))
    assert fewer > same > more


def test_choices_follow_the_count() -> None:
    only_fewest = (True, False, False)
    of = convolution(2, 56, 64, 128)
    assert on_each(lambda target: is_worthwhile(of, {}, target)) == only_fewest
    of = convolution(8, 28, 256, 512)
    back = of.input_gradient
    assert on_each(lambda target: prefers_shared(of, back, {}, target)) == only_fewest
    of = convolution(8, 56, 128, 128)
    assert on_each(lambda target: gradient_pays(of, {}, target, True)) == only_fewest


@pytest.mark.parametrize(
    ("model", "shape"),
    [(nn.Linear(1024, 1024), (768, 1024)), (nn.Conv2d(64, 128, 3, padding=1), (2, 64, 56, 56))],
    ids=["matmul", "convolution"],
)
def test_rewriting_follows_the_count(model: nn.Module, shape: tuple[int, ...]) -> None:
    """At these sizes ours pays where PyTorch's has few processors, too."""

    def is_ours(target: Target) -> bool:
        x = torch.randn(shape)
        found = prepare(model, (x,), modes=("eval",), device=x.device, target=target)
        return found.modes[0].inference.on_tensor_cores

    assert on_each(is_ours) == (True, False, False)


def test_planning_asks_for_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed while inputs are staged, and which gradients share what was staged."""
    given: dict[str, set[object]] = {"prefers_computed": set(), "prefers_shared": set()}
    for module, name in ((prologues, "prefers_computed"), (staged_pairs, "prefers_shared")):

        def answer(*asked: object, name: str = name) -> bool:
            given[name].add(asked[3])
            return False

        monkeypatch.setattr(module, name, answer)
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.SiLU())
    x = torch.randn(64, 64, 56, 56, requires_grad=True)
    prepare(model, (x,), modes=("train",), device=x.device, target=TARGETS[114])
    assert all(each == {TARGETS[114]} for each in given.values())


def test_a_batch_breaks_even_by_the_count() -> None:
    model, x = nn.Linear(2048, 2048), torch.randn(4096, 2048)

    def least_batch(target: Target) -> int:
        (made,) = prepare(model, (x,), modes=("eval",), device=x.device, target=target).modes
        return made.worth[1] if made.worth else 0

    least = on_each(least_batch)
    assert len(set(least)) == 3 and max(least) < 1024, least
