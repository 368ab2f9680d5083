"""Convolutions with reductions in their epilogue: what is planned, and its text."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fusewright.codegen import convolution as convolution_text
from fusewright.codegen.convolution import FOLDED_PARTIALS, MOST_PARTIALS, convolution_forms
from fusewright.codegen.source import RoundedWorkspace, Workspace
from fusewright.compile.pipeline import prepare
from fusewright.cost.conv_tensor_core import image_positions
from fusewright.ir.convolution import ConvolutionKernel
from fusewright.ir.epilogue import Reduces
from fusewright.ir.graph import Dim
from fusewright.ir.loop import Apply
from fusewright.plan import rows
from fusewright.rewrite import convolutions
from fusewright.schedule.sweeps import part_bytes, sweeps
from fusewright.schedule.tensor_core import ConvolutionSchedule, choose_convolution
from fusewright.target.target import Target
from tests.support.reduced_convolutions import (
    CASES,
    CUDA,
    SHAPES,
    Forward,
    Layer,
    biased,
    convolutions_of,
    instances,
    layers,
    normed,
    over_channels,
    pooled,
    prepared,
    prepared_small,
    two_layers,
)

pytestmark = pytest.mark.usefixtures("reduces_small_convolutions")


# Planning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_which_reductions_go_into_the_epilogue(name: str) -> None:
    follows, reduces, per_image, together = CASES[name]
    found = prepared_small(follows)
    (kernel,) = convolutions_of(found.modes[0].forward)
    assert (kernel.reduces, kernel.per_image, kernel.together) == (reduces, per_image, together)


def test_results_that_nothing_reads_are_not_written() -> None:
    """Without gradients, only the pooled or normalised result is written, or written twice."""
    for follows in (pooled, over_channels):
        found = prepared_small(follows)
        (step,) = found.modes[0].inference.steps[:1]
        specs = dict(found.modes[0].inference.specs)
        assert step.kind == "convolution" and step.kernel.reduces is not Reduces.NOTHING
        assert not any(len(specs[each].shape) == 4 for each in step.outputs)
    # Backward of a mean needs no more of the result than its sizes.
    found = prepared_small(pooled)
    specs = dict(found.modes[0].forward.specs)
    assert [specs[o].shape[2:] for o in found.modes[0].forward.steps[0].outputs] != []
    found = prepared(Layer(lambda m, x: m.conv(x).mean((2, 3))), torch.randn(3, 12, 8, 8))
    (step,) = (each for each in found.modes[0].forward.steps if each.kind == "convolution")
    assert [len(dict(found.modes[0].forward.specs)[each].shape) for each in step.outputs] == [2]


@pytest.mark.parametrize("follows", [normed, pooled, over_channels])
def test_results_that_are_written_are_reduced_on_trial_only(follows: Forward) -> None:
    """Values saved for backward can be read again as fast. Values that nothing reads are
    reduced."""
    x = torch.randn(3, 12, 8, 8)
    found = prepare(Layer(follows), (x,), modes=("train",), device=x.device, target=Target.cuda())
    for plan in (found.modes[0].forward, found.modes[0].inference):
        (kernel,), specs = convolutions_of(plan), dict(plan.specs)
        of = kernel.geometry
        elements = of.images * (of.results * of.y.result * of.x.result)
        written = [specs[each.name].numel for each in kernel.arguments if each.is_output]
        assert kernel.reduces is Reduces.NOTHING or elements not in written
    # A normalised result is computed from the convolution's, which is read twice.
    assert (kernel.reduces is Reduces.NOTHING) == (follows is normed)


@pytest.mark.parametrize(
    "how", [{"results": 24}, {"transposed": True, "stride": 2}, {"channels": 16, "groups": 8}]
)
def test_kernels_that_are_faster_without_reductions_have_none(
    how: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in groups of eight, interleaved rows and direct convolutions reduce nothing."""
    monkeypatch.setattr(convolutions, "prefers_direct", lambda *_: "groups" in how)
    x = torch.randn(3, how.get("channels", 12), 8, 8)  # type: ignore[call-overload]
    model = Layer(lambda m, x: m.conv(x).mean((2, 3)), **how)  # type: ignore[arg-type]
    found = prepare(model, (x,), modes=("eval",), device=x.device, target=Target.cuda())
    steps = found.modes[0].inference.steps
    assert all(w.reduces is Reduces.NOTHING for w in convolutions_of(found.modes[0].inference))
    assert sum(step.kind == "loop" for step in steps) == 1


@pytest.mark.parametrize(("follows", "sums"), [(two_layers, 2), (biased, 1)])
def test_gradients_are_reduced_where_they_are_computed(follows: Forward, sums: int) -> None:
    found = prepared(Layer(follows), torch.randn(3, 12, 8, 8))
    kernels = [each for each in convolutions_of(found.modes[0].backward) if each.epilogue.inner]
    (kernel,) = kernels
    assert (kernel.reduces, kernel.per_image) == (Reduces.ACROSS, False)
    reduced = [item for item in kernel.epilogue.body if type(item).__name__ == "Reduce"]
    assert len(reduced) == sums


@pytest.mark.parametrize(
    "follows",
    [
        lambda m, x: m.conv(x).mean(3),
        lambda m, x: m.conv(x).sum((1, 3)),
        lambda m, x: m.conv(x).sum(0),
        lambda m, x: (m.conv(x) ** 2).mean(),
        lambda m, x: m.conv(x).unflatten(3, (2, 4)).sum((0, 2, 4)),
    ],
)
def test_other_reductions_stay_loops(follows: Forward) -> None:
    plan = prepared(Layer(follows), torch.randn(3, 12, 8, 8)).modes[0].inference
    (kernel,) = convolutions_of(plan)
    assert kernel.reduces is Reduces.NOTHING
    assert any(step.kind == "loop" for step in plan.steps)


def test_reductions_of_views_go_into_the_epilogue() -> None:
    """Merged axes are split again."""

    def flat(m: nn.Module, x: Tensor) -> Tensor:
        y = m.conv(x)  # type: ignore[operator]
        return y.flatten(2).flatten(0, 1).sum(1)  # type: ignore[no-any-return]

    (kernel,) = convolutions_of(prepared(Layer(flat), torch.randn(3, 12, 8, 8)).modes[0].inference)
    assert (kernel.reduces, kernel.per_image, kernel.together) == (Reduces.ACROSS, True, 1)
    assert [axis.name for axis in kernel.epilogue.axes] == ["image", "channel", "y", "x"]


def test_short_rows_are_held_by_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """One loop that holds a row is faster than reading it twice."""
    monkeypatch.setattr(rows, "ROW_BYTES", 128 * 1024)
    for follows in (normed, instances):
        (kernel,) = convolutions_of(
            prepared(Layer(follows), torch.randn(3, 12, 8, 8)).modes[0].forward
        )
        assert kernel.reduces is Reduces.NOTHING


def test_workspaces_hold_weights_and_parts() -> None:
    both = Workspace(Dim(64), Dim(100, ("s0",)), 256, fixed=512)
    assert both.at({"s0": 3}) == 512 + 64 * 2 == eval(str(both), {"s0": 3})
    assert str(Workspace(fixed=12)) == "12" and Workspace(fixed=12) and not Workspace()
    assert str(Workspace(Dim(8, ("s0",)), fixed=12)) == "12 + 8*s0"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "shape", ["one image", "small images", "bands", "transposed", "transposed 4x4"]
)
def test_the_workspace_has_room_for_all_partial_results(shape: str) -> None:
    """As `staged_workspace` in sm90_implicit_gemm.cuh counts them, for either width of tiles."""
    size, how = SHAPES[shape]
    found = prepared(layers(CASES, how), torch.randn(size))
    for kernel in convolutions_of(found.modes[0].forward):
        if kernel.reduces is Reduces.NOTHING:
            continue  # over a single image a layer norm is over everything
        of, sizes = kernel.geometry, {"s0": size[0]}
        schedule = choose_convolution(kernel, CUDA, sizes)
        assert isinstance(schedule, ConvolutionSchedule)
        staged_too = replace(schedule, staged_positions=128, ping_pong=False)
        for how_many, tile in itertools.product((schedule, staged_too), (128, 256)):
            walked = of.as_staged if how_many.staged_positions else of
            image = image_positions(walked, schedule.band_width)
            workspace = convolution_text.convolution_workspace(kernel, how_many)
            partials = -(-size[0] * image // tile) * tile // 64
            partials = ((image + 62) // 64 + 1) if kernel.per_image else partials
            partials *= kernel.together * len(of.residue_classes)
            partials += FOLDED_PARTIALS if partials > MOST_PARTIALS else 0
            if kernel.reduces is Reduces.DOWN:
                partials = of.groups * -(-of.results // 16)  # each warp stores its own
            parts = partials * kernel.epilogue.outer_numel.at(sizes)
            needed = parts * part_bytes(sweeps(kernel.epilogue))
            kept = replace(
                workspace, rounded=RoundedWorkspace()
            )  # the part before the partial results
            assert of.workspace_bytes + needed <= kept.at(sizes)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("width", "stored", "reduced"), [(9, 1, 1), (10, 2, 2), (12, 4, 2)])
def test_how_many_columns_an_epilogue_takes_at_once(width: int, stored: int, reduced: int) -> None:
    """Stores take as many as are aligned; reductions over positions take pairs."""
    found = prepared(layers(CASES, {}), torch.randn(3, 12, 5, width))
    for kernel in convolutions_of(found.modes[0].forward):
        assert kernel.reduces is not Reduces.NOTHING
        lanes = [(each.schedule.kind, each.schedule.lanes) for each in convolution_forms(kernel)]
        by_column = [("column", stored)]
        by_row = [("row", reduced)] if kernel.reduces is Reduces.ACROSS else []
        assert lanes in (by_column + by_row, by_row)


def test_stores_and_reductions_are_separate_epilogues() -> None:
    """Each computes what it needs, and nothing of the other."""

    def follows(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.conv(x)  # type: ignore[operator]
        return torch.sigmoid(y * m.scale), torch.tanh((y + m.shift).sum((0, 2, 3)))

    (kernel,) = convolutions_of(
        prepared(Layer(follows), torch.randn(3, 12, 8, 8)).modes[0].inference
    )
    stores, reduces = convolution_forms(kernel)
    ops = [
        {item.op for item in form.kernel.body if isinstance(item, Apply)}
        for form in (stores, reduces)
    ]
    assert ops == [{"add", "mul", "sigmoid"}, {"add", "tanh"}]
    touched = [{each.name for each in form.kernel.arguments} for form in (stores, reduces)]
    assert {"scale"} <= touched[0] and {"shift"} <= touched[1]
    assert touched[0] & touched[1] <= {"conv_bias"}
    # Images and positions, channels: neither takes more axes than it must.
    assert [len(stores.kernel.outer), len(stores.kernel.inner)] == [2, 1]
    text = "\n".join(
        convolution_text.convolution_lines(kernel, (stores, reduces), schedule_of(kernel))
    )
    assert f"fw::ByColumn<{kernel.name}_stores_body<" in text
    assert "fw::StoredAndReduced end{stored, reduced};" in text


def schedule_of(kernel: ConvolutionKernel) -> ConvolutionSchedule:
    schedule = choose_convolution(kernel, CUDA, {"s0": 3})
    assert isinstance(schedule, ConvolutionSchedule)
    return schedule
