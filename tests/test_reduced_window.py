"""A convolution reduced in its epilogue: what is planned, and the kernels by emulation."""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright import layout_schedule
from fusewright.codegen import render as rendering
from fusewright.codegen import window as window_text
from fusewright.codegen.ending import ending_forms
from fusewright.codegen.source import Rounded, Source, Workspace
from fusewright.codegen.window import FOLDED_LINES, MOST_LINES
from fusewright.ending import Reduces
from fusewright.ir import Dim
from fusewright.layout_schedule import WindowSchedule, choose_window
from fusewright.loop import Apply
from fusewright.pipeline import Prepared, prepare
from fusewright.plan import rows
from fusewright.plan.steps import Loop, Plan, Window
from fusewright.rewrite import windows
from fusewright.runtime import tensor_cores
from fusewright.schedule import Target
from fusewright.sweep import part_bytes, sweeps
from fusewright.window import WindowKernel
from fusewright.window_cost import image_positions
from tests.cores_on_host import host_library, on_host, with_stand_in
from tests.emulated_modules import (
    INFERRED,
    TRAINED,
    as_exact_as_eager,
    of_kernels,
    on_library,
    put_on_cores,
)

CUDA = Target.cuda(trials=("sweeping",))

Forward = Callable[[nn.Module, Tensor], object]


class Layer(nn.Module):
    """A convolution and what follows it."""

    def __init__(
        self, forward: Forward, channels: int = 12, results: int = 8, **how: object
    ) -> None:
        super().__init__()
        how = {"kernel_size": 3, "padding": 1, "bias": forward not in UNBIASED, **how}
        kind = nn.ConvTranspose2d if how.pop("transposed", False) else nn.Conv2d
        self.conv = kind(channels, results, **how)  # type: ignore[arg-type]
        self.batch = nn.BatchNorm2d(results)
        self.group = nn.GroupNorm(2, results)
        self.second = nn.Conv2d(results, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(results, 1, 1) + 0.5)
        self.register_buffer("shift", torch.randn(results, 1, 1))
        self.follows = forward

    def forward(self, x: Tensor) -> object:
        return self.follows(self, x)


def normed(m: nn.Module, x: Tensor) -> Tensor:
    return F.silu(m.batch(m.conv(x) + m.shift))  # type: ignore[operator]


def two_layers(m: nn.Module, x: Tensor) -> Tensor:
    """Backward sums what the second's gradient by its input gives, twice for each channel."""
    return m.second(torch.relu(m.batch(m.conv(x))))  # type: ignore[operator,no-any-return]


def biased(m: nn.Module, x: Tensor) -> Tensor:
    """Backward sums what the second's gradient by its input gives: the first bias's."""
    return m.second(torch.sigmoid(m.conv(x)))  # type: ignore[operator,no-any-return]


def pooled(m: nn.Module, x: Tensor) -> Tensor:
    return (m.conv(x) * m.scale).mean((2, 3))  # type: ignore[operator,no-any-return]


def largest(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Backward looks for what equals the largest: it must find it."""
    y = torch.tanh(m.conv(x))  # type: ignore[operator]
    return F.adaptive_avg_pool2d(y, 1), y.amax((2, 3))


def grouped(m: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(m.group(m.conv(x)))  # type: ignore[operator]


def of_images(m: nn.Module, x: Tensor) -> Tensor:
    y = m.conv(x)  # type: ignore[operator]
    return F.layer_norm(y, y.shape[1:])


def instances(m: nn.Module, x: Tensor) -> Tensor:
    return F.instance_norm(m.conv(x)) * m.scale  # type: ignore[operator]


def over_channels(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.conv(x) * m.scale  # type: ignore[operator]
    return y.amax(1), y.mean(1, keepdim=True)


def powers_of_channels(m: nn.Module, x: Tensor) -> Tensor:
    return (m.conv(x) * m.scale).logsumexp(1)  # type: ignore[operator,no-any-return]


def powers_of_space(m: nn.Module, x: Tensor) -> Tensor:
    return torch.sigmoid(m.conv(x)).logsumexp((2, 3))  # type: ignore[operator]


def softmaxed(m: nn.Module, x: Tensor) -> Tensor:
    return m.conv(x).softmax(1)  # type: ignore[operator,no-any-return]


# Gradients of biases that a norm takes away are zero, and their errors no measure.
UNBIASED = (normed, two_layers, of_images, instances)
# What follows, what its kernel reduces, for each image apart or not, channels that go together.
CASES: dict[str, tuple[Forward, Reduces, bool, int]] = {
    "batch norm": (normed, Reduces.ACROSS, False, 1),
    "pooled": (pooled, Reduces.ACROSS, True, 1),
    "largest": (largest, Reduces.ACROSS, True, 1),
    "group norm": (grouped, Reduces.ACROSS, True, 4),
    "layer norm": (of_images, Reduces.ACROSS, True, 8),
    "instance norm": (instances, Reduces.ACROSS, True, 1),
    "over channels": (over_channels, Reduces.DOWN, True, 1),
    "softmax": (softmaxed, Reduces.DOWN, True, 1),
    "logsumexp of channels": (powers_of_channels, Reduces.DOWN, True, 1),
    "logsumexp of space": (powers_of_space, Reduces.ACROSS, True, 1),
}
# Images in memory, the convolution: one image, many in a tile, rows in bands, odd sizes, groups.
SHAPES: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    "one image": ((1, 12, 13, 20), {}),
    "small images": ((17, 12, 3, 4), {"kernel_size": 1, "padding": 0}),
    "tiny images": ((40, 12, 1, 2), {"kernel_size": 1, "padding": 0}),
    "bands": ((1, 12, 2, 232), {}),
    "odd, groups": ((2, 12, 6, 9), {"groups": 2}),
    "stride": ((3, 12, 11, 16), {"stride": 2}),
    "many channels": ((2, 12, 3, 8), {"results": 136}),
    "transposed": ((3, 12, 5, 6), {"transposed": True, "stride": 2}),
    "transposed 4x4": ((2, 12, 5, 6), {"transposed": True, "stride": 2, "kernel_size": 4}),
}


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    put_on_cores(monkeypatch)
    monkeypatch.setattr(windows, "FEWEST_CHANNELS", 1)
    monkeypatch.setattr(rows, "ROW_BYTES", 0)  # as if rows were too long to be held
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


def prepared(model: nn.Module, x: Tensor) -> Prepared:
    return prepare(model, (x,), modes=("train",), device=x.device, target=CUDA)


@functools.cache
def prepared_small(follows: Forward) -> Prepared:
    """For tests that plan as this file's fixture has it."""
    return prepared(Layer(follows), torch.randn(3, 12, 8, 8))


def windows_of(plan: Plan) -> list[WindowKernel]:
    return [step.kernel for step in plan.steps if isinstance(step, Window)]


# Planning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_is_planned(name: str) -> None:
    follows, reduces, per_image, together = CASES[name]
    found = prepared_small(follows)
    (kernel,) = windows_of(found.modes[0].forward)
    assert (kernel.reduces, kernel.per_image, kernel.together) == (reduces, per_image, together)


def test_what_nothing_reads_is_not_written() -> None:
    """Without gradients, what is pooled or normed is the only thing to write, or to write twice."""
    for follows in (pooled, over_channels):
        found = prepared_small(follows)
        (step,) = found.modes[0].inference.steps[:1]
        specs = dict(found.modes[0].inference.specs)
        assert isinstance(step, Window) and step.kernel.reduces is not Reduces.NOTHING
        assert not any(len(specs[each].shape) == 4 for each in step.outputs)
    # Backward of a mean needs no more of the result than its sizes.
    found = prepared_small(pooled)
    specs = dict(found.modes[0].forward.specs)
    assert [specs[o].shape[2:] for o in found.modes[0].forward.steps[0].outputs] != []
    found = prepared(Layer(lambda m, x: m.conv(x).mean((2, 3))), torch.randn(3, 12, 8, 8))
    (step,) = (each for each in found.modes[0].forward.steps if isinstance(each, Window))
    assert [len(dict(found.modes[0].forward.specs)[each].shape) for each in step.outputs] == [2]


@pytest.mark.parametrize("follows", [normed, pooled, over_channels])
def test_what_is_written_is_reduced_on_trial_only(follows: Forward) -> None:
    """What a step saves for backward can be read again as fast; what nothing reads is reduced."""
    x = torch.randn(3, 12, 8, 8)
    found = prepare(Layer(follows), (x,), modes=("train",), device=x.device, target=Target.cuda())
    for plan in (found.modes[0].forward, found.modes[0].inference):
        (kernel,), specs = windows_of(plan), dict(plan.specs)
        of = kernel.geometry
        elements = of.images * (of.results * of.y.result * of.x.result)
        written = [specs[each.name].numel for each in kernel.arguments if each.is_output]
        assert kernel.reduces is Reduces.NOTHING or elements not in written
    # A normed result is made of the convolution's, which is read twice.
    assert (kernel.reduces is Reduces.NOTHING) == (follows is normed)


@pytest.mark.parametrize(
    "how", [{"results": 24}, {"transposed": True, "stride": 2}, {"channels": 16, "groups": 8}]
)
def test_what_is_faster_without_reductions_has_none(
    how: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights by eight, woven rows and plain sums reduce nothing."""
    monkeypatch.setattr(windows, "prefers_direct", lambda *_: "groups" in how)
    x = torch.randn(3, how.get("channels", 12), 8, 8)  # type: ignore[call-overload]
    model = Layer(lambda m, x: m.conv(x).mean((2, 3)), **how)  # type: ignore[arg-type]
    found = prepare(model, (x,), modes=("eval",), device=x.device, target=Target.cuda())
    steps = found.modes[0].inference.steps
    assert all(w.reduces is Reduces.NOTHING for w in windows_of(found.modes[0].inference))
    assert sum(isinstance(step, Loop) for step in steps) == 1


@pytest.mark.parametrize(("follows", "sums"), [(two_layers, 2), (biased, 1)])
def test_gradients_are_reduced_where_they_are_made(follows: Forward, sums: int) -> None:
    found = prepared(Layer(follows), torch.randn(3, 12, 8, 8))
    kernels = [each for each in windows_of(found.modes[0].backward) if each.epilogue.inner]
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
    (kernel,) = windows_of(plan)
    assert kernel.reduces is Reduces.NOTHING
    assert any(isinstance(step, Loop) for step in plan.steps)


def test_views_are_no_hindrance() -> None:
    """Axes that run on into one another are taken apart."""

    def flat(m: nn.Module, x: Tensor) -> Tensor:
        y = m.conv(x)  # type: ignore[operator]
        return y.flatten(2).flatten(0, 1).sum(1)  # type: ignore[no-any-return]

    (kernel,) = windows_of(prepared(Layer(flat), torch.randn(3, 12, 8, 8)).modes[0].inference)
    assert (kernel.reduces, kernel.per_image, kernel.together) == (Reduces.ACROSS, True, 1)
    assert [axis.name for axis in kernel.epilogue.axes] == ["image", "channel", "y", "x"]


def test_short_rows_are_held_by_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is read twice is better read by one loop that holds it, if it can."""
    monkeypatch.setattr(rows, "ROW_BYTES", 128 * 1024)
    for follows in (normed, instances):
        (kernel,) = windows_of(prepared(Layer(follows), torch.randn(3, 12, 8, 8)).modes[0].forward)
        assert kernel.reduces is Reduces.NOTHING


def test_workspaces_hold_weights_and_parts() -> None:
    both = Workspace(Dim(64), Dim(100, ("s0",)), 256, fixed=512)
    assert both.at({"s0": 3}) == 512 + 64 * 2 == eval(str(both), {"s0": 3})
    assert str(Workspace(fixed=12)) == "12" and Workspace(fixed=12) and not Workspace()
    assert str(Workspace(Dim(8, ("s0",)), fixed=12)) == "12 + 8*s0"


@pytest.mark.parametrize(
    "shape", ["one image", "small images", "bands", "transposed", "transposed 4x4"]
)
def test_the_workspace_has_room_for_all_lines(shape: str) -> None:
    """As `lines_of` in sm90_window.cuh counts them, for either width of tiles."""
    size, how = SHAPES[shape]
    found = prepared(layers(CASES, how), torch.randn(size))
    for kernel in windows_of(found.modes[0].forward):
        if kernel.reduces is Reduces.NOTHING:
            continue  # over a single image a layer norm is over everything
        of, sizes = kernel.geometry, {"s0": size[0]}
        schedule = choose_window(kernel, CUDA, sizes)
        assert isinstance(schedule, WindowSchedule)
        lines_too = replace(schedule, line_positions=128, turns=False)
        for how_many, tile in itertools.product((schedule, lines_too), (128, 256)):
            walked = of.in_lines if how_many.line_positions else of
            image = image_positions(walked, schedule.band_width)
            workspace = window_text.window_entry(kernel, how_many).workspace
            lines = -(-size[0] * image // tile) * tile // 64
            lines = ((image + 62) // 64 + 1) if kernel.per_image else lines
            lines *= kernel.together * len(of.classes)
            lines += FOLDED_LINES if lines > MOST_LINES else 0
            if kernel.reduces is Reduces.DOWN:
                lines = of.groups * -(-of.results // 16)  # each warp leaves what it has of them
            parts = lines * kernel.epilogue.outer_numel.at(sizes)
            needed = parts * part_bytes(sweeps(kernel.epilogue))
            kept = replace(workspace, rounded=Rounded())  # what lies before lines
            assert of.workspace_bytes + needed <= kept.at(sizes)


@pytest.mark.parametrize(("width", "stored", "reduced"), [(9, 1, 1), (10, 2, 2), (12, 4, 2)])
def test_columns_that_go_together(width: int, stored: int, reduced: int) -> None:
    """By channels as many as are aligned; over positions a thread has pairs of them."""
    found = prepared(layers(CASES, {}), torch.randn(3, 12, 5, width))
    for kernel in windows_of(found.modes[0].forward):
        assert kernel.reduces is not Reduces.NOTHING
        lanes = [(each.schedule.kind, each.schedule.lanes) for each in ending_forms(kernel)]
        by_column = [("column", stored)]
        by_row = [("row", reduced)] if kernel.reduces is Reduces.ACROSS else []
        assert lanes in (by_column + by_row, by_row)


def test_stores_and_reductions_are_apart() -> None:
    """Each has what it is made of, and nothing of the other."""

    def follows(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.conv(x)  # type: ignore[operator]
        return torch.sigmoid(y * m.scale), torch.tanh((y + m.shift).sum((0, 2, 3)))

    (kernel,) = windows_of(prepared(Layer(follows), torch.randn(3, 12, 8, 8)).modes[0].inference)
    stores, reduces = ending_forms(kernel)
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
    text = "\n".join(window_text.window_lines(kernel, (stores, reduces), schedule_of(kernel)))
    assert f"{kernel.name}_stores_body" in text and "fw::StoredAndReduced{fw::ByColumn<" in text


def schedule_of(kernel: WindowKernel) -> WindowSchedule:
    schedule = choose_window(kernel, CUDA, {"s0": 3})
    assert isinstance(schedule, WindowSchedule)
    return schedule


# Emulated -------------------------------------------------------------------------------------


class Layers(nn.Module):
    """All that may follow, side by side."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names = tuple(layers)
        self.layers = nn.ModuleList(layers.values())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = [layer(x) for layer in self.layers]
        return tuple(out for each in made for out in (each if isinstance(each, tuple) else (each,)))


def layers(names: Iterable[str], how: Mapping[str, object]) -> Layers:
    kinds = {name: case[0] for name, case in CASES.items()} | {"two": two_layers, "bias": biased}
    torch.manual_seed(0)
    return Layers({name: Layer(kinds[name], **how) for name in names})  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
def test_emulated_results_are_as_exact_as_eagers(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, how = SHAPES[shape]
    model = layers(("batch norm", "largest", "group norm", "over channels"), how)
    x = torch.randn(size)
    fast = emulated(model, x, monkeypatch)
    batch = size[0] + 3 if size[0] > 1 else 1
    compare(fast, model, torch.randn(batch, *size[1:]), 1e-6)


def compare(fast: nn.Module, model: nn.Module, x: Tensor, least: float) -> None:
    """What a module on emulated kernels gives, with float64."""
    exactly = copy.deepcopy(model).double()
    with torch.no_grad():
        ours, eager, truth = fast(x), model(x), exactly(x.double())
    for mine, theirs, exact in zip(ours, eager, truth, strict=True):
        assert mine.shape == theirs.shape
        allowed = max(least, 2.0 * float((theirs.double() - exact).norm() / exact.norm()))
        assert float((mine.double() - exact).norm() / exact.norm()) <= allowed


def test_emulated_modules_train_as_eager_does(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers(("two", "bias", "instance norm", "layer norm", "softmax", "pooled"), {})
    x = torch.randn(2, 12, 5, 6)
    made = emulated_source(model, x, monkeypatch)
    fast = on_library(model, x, *made, TRAINED)
    as_exact_as_eager(fast, model, x, least=2e-6)
    for first, second in zip(fast(x), fast(x), strict=True):
        assert torch.equal(first, second), "two runs, two results"
    torch.backends.cudnn.allow_tf32 = True  # whose tiles have twice the positions
    compare(on_library(model, x, *made, INFERRED), model, torch.randn(11, 12, 5, 6), 4e-3)
    assert asked


@pytest.mark.parametrize("width", [9, 10, 12])
def test_channels_cross_warps(
    width: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 of them, 20 go together; one, two and four positions at a time, with either precision."""
    names = ("batch norm", "largest", "group norm", "over channels", "pooled")
    model = layers(names, {"results": 40})
    x = torch.randn(3, 12, 6, width)
    fast = emulated(model, x, monkeypatch)
    compare(fast, model, x, 1e-6)
    torch.backends.cudnn.allow_tf32 = True
    compare(fast, model, torch.randn(5, 12, 6, width), 4e-3)
    assert asked


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_read_beside_sums(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes that a thread reads two numbers of at once, and those whose columns lie apart."""

    def follows(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        beside = x[:, :8].transpose(2, 3) if turned else x[:, :8]
        y = m.conv(x) * beside  # type: ignore[operator]
        return y, y.sum((0, 2, 3)), y.amax((2, 3))

    torch.manual_seed(0)
    model, x = Layer(follows), torch.randn(3, 12, 10, 10)
    found = prepared(model, x)
    planes = [
        form.kernel.inner[-1].name == "plane"
        for kernel in windows_of(found.modes[0].inference)
        for form in ending_forms(kernel)
        if form.is_row
    ]
    assert planes and set(planes) == {not turned}
    compare(emulated(model, x, monkeypatch), model, torch.randn(5, 12, 10, 10), 1e-6)


def test_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are Inf or NaN are made anew before they are reduced."""

    def follows(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        y = m.conv(x) * m.scale  # type: ignore[operator]
        return y, y.sum((2, 3)), y.amax((0, 2, 3)), y.amin(1), y.sum(1)

    torch.manual_seed(0)
    model = Layer(follows, results=20)
    x = torch.randn(6, 12, 6, 10)
    x[1, 3, 2, 4], x[2, 0, 0, 0], x[4, 5, 5, 9] = float("inf"), -float("inf"), float("nan")
    fast = emulated(model, x, monkeypatch)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        for mine, truth in zip(fast(x), exact, strict=True):
            torch.testing.assert_close(mine.double(), truth, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_inputs_that_are_laid_out_first(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As halves, a scale for each image; tiles have several images."""
    monkeypatch.setattr(layout_schedule, "prefers_lines", lambda *_: True)
    model = layers(("batch norm", "group norm", "over channels"), {})
    fast = emulated(model, torch.randn(2, 12, 5, 6), monkeypatch, ("fw::ByLines<", "fw::ByLines<"))
    torch.backends.cudnn.allow_tf32 = True
    x = torch.randn(11, 12, 5, 6) * torch.exp2(torch.arange(11.0) * 3).view(-1, 1, 1, 1)
    compare(fast, model, x, 4e-3)
    assert asked


def test_classes_that_read_one_plane(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of a transposed convolution, whose planes are longer than those of one class, in a
    workspace right behind what is reduced."""
    monkeypatch.setattr(layout_schedule, "prefers_lines", lambda *_: True)
    how = {"transposed": True, "stride": 2, "kernel_size": 4}
    model = layers(("batch norm", "pooled"), how)
    x = torch.randn(40, 12, 7, 6)
    fast = emulated(model, x, monkeypatch, ("fw::ByLines<", "fw::ByLines<"))
    torch.backends.cudnn.allow_tf32 = True
    compare(fast, model, x, 4e-3)
    assert asked


class Around(nn.Module):
    """Read beside the sums: a channel's numbers, a column's, a row's and all of them."""

    def __init__(self, conv: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.conv = conv
        _, results, height, width = conv(x).shape
        sizes = ((results, 1, 1), (width,), (height, 1), (results, height, width))
        self.beside = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        scale, column, row, everything = self.beside
        z = torch.relu(y * scale) * column + row
        return z, z * everything + y.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("lines", [False, True])
def test_rows_by_eight_read_what_is_around(
    lines: bool, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Woven ones with 4, 2 and 1 columns at a time, and few results."""
    monkeypatch.setattr(layout_schedule, "prefers_lines", lambda *_: lines)
    torch.manual_seed(0)
    x = torch.randn(3, 12, 5, 8)
    convs = {
        "4x4": nn.ConvTranspose2d(12, 10, 4, 2, 1),
        "groups": nn.ConvTranspose2d(12, 12, (3, 5), 2, 1, groups=2),
        "odd columns": nn.ConvTranspose2d(12, 20, 3, 2, 1),
        "few results": nn.Conv2d(12, 24, 3, padding=1),
    }
    model = Layers({name: Around(conv, x) for name, conv in convs.items()})
    made = emulated_source(model, x, monkeypatch, reduces=False)
    as_exact_as_eager(on_library(model, x, *made, TRAINED), model, x, least=2e-6)
    torch.backends.cudnn.allow_tf32 = True
    compare(on_library(model, x, *made, INFERRED), model, torch.randn(5, 12, 5, 8), 4e-3)
    assert asked


def test_many_lines_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are with large batches."""
    monkeypatch.setattr(window_text, "MOST_LINES", 4)
    model = layers(("batch norm", "group norm"), {})
    x = torch.randn(5, 12, 6, 10)
    few = "kMostLines = 4, kFoldedLines = 3"
    fast = emulated(model, x, monkeypatch, ("kMostLines = 2048, kFoldedLines = 256", few))
    compare(fast, model, x, 1e-6)


def test_no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of nothing are zero: an entry still joins what no tile has left."""

    def summed(m: nn.Module, x: Tensor) -> Tensor:
        return m.conv(x).sum((0, 2, 3))  # type: ignore[operator,no-any-return]

    monkeypatch.setattr(rendering, "flattened", with_stand_in)
    found = prepared(Layer(summed), torch.randn(3, 12, 8, 8))
    (step,) = (each for each in found.modes[0].inference.steps if isinstance(each, Window))
    (entry,) = (each for each in found.source.entries if each.name == step.name)
    out = torch.full((8,), 5.0)
    empty = ctypes.c_void_p(torch.empty(0, 12, 8, 8).data_ptr())
    weight, workspace = torch.randn(8, 12, 3, 3), torch.empty(entry.workspace.at({"s0": 0}))
    bias = torch.randn(8)  # which may be read although no sum has it
    given = dict.fromkeys(entry.arguments, ctypes.c_void_p(bias.data_ptr()))
    given[step.kernel.source.buffer] = empty
    given[step.kernel.filter.buffer] = ctypes.c_void_p(weight.data_ptr())
    given[step.outputs[-1]] = ctypes.c_void_p(out.data_ptr())
    images = ctypes.c_int64(0)
    where = [ctypes.c_void_p(workspace.data_ptr()), ctypes.c_int(0), ctypes.c_void_p(0)]
    source = Source("host", on_host(found.source.text), found.source.entries)
    library = host_library(of_kernels(source, {entry.name}).text)
    assert getattr(library, entry.name)(*given.values(), images, *where) == 0
    assert (out == 0).all()


def emulated(
    model: nn.Module,
    x: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    instead: tuple[str, str] = ("", ""),
) -> nn.Module:
    """The module on its kernels, run by fibers, for calls without gradients."""
    made = emulated_source(model, x, monkeypatch, instead)
    return on_library(model, x, *made, INFERRED)


def emulated_source(
    model: nn.Module,
    x: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    instead: tuple[str, str] = ("", ""),
    reduces: bool = True,
) -> tuple[Prepared, Source]:
    """Kernels for fibers; some of their text may be another instead."""
    monkeypatch.setattr(rendering, "flattened", with_stand_in)
    monkeypatch.setitem(tensor_cores._FW_CORES, None, True)  # type: ignore[arg-type]
    found = prepared(model, x)
    mode = found.modes[0]
    kernels = (*windows_of(mode.forward), *windows_of(mode.backward))
    assert ({each.reduces for each in kernels} != {Reduces.NOTHING}) == reduces
    assert instead[0] in found.source.text
    text = found.source.text.replace(*instead) if instead[0] else found.source.text
    return found, Source("host", on_host(text), found.source.entries)
