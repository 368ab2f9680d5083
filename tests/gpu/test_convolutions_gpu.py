"""Convolutions on the tensor cores of a GPU: shapes, layouts, precisions, gradients, edges."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fusewright.compile.pipeline import prepare
from fusewright.cost import conv_direct
from fusewright.plan.steps import Call
from fusewright.rewrite import convolutions, layouts
from fusewright.schedule import tensor_core
from tests.support.convolution_shapes import CONVOLUTIONS
from tests.support.gpu import eager_and_exact, needs_hopper, optimized_copy, trained_on_gpu
from tests.support.tensors import error

pytestmark = [needs_hopper, pytest.mark.usefixtures("every_convolution")]


TRANSPOSED: dict[str, tuple[dict[str, object], tuple[int, ...]]] = {
    "transposed 4x4, stride 2": (
        {"in_channels": 128, "out_channels": 64, "kernel_size": 4, "stride": 2, "padding": 1},
        (4, 128, 32, 32),
    ),
    "transposed 3x3, stride 2": (
        {"in_channels": 96, "out_channels": 160, "kernel_size": 3, "stride": 2, "padding": 1}
        | {"output_padding": 1},
        (4, 96, 29, 31),
    ),
    "transposed 2x2, stride 2": (
        {"in_channels": 64, "out_channels": 32, "kernel_size": 2, "stride": 2},
        (3, 64, 40, 40),
    ),
    "transposed, narrower than its stride": (
        {"in_channels": 32, "out_channels": 48, "kernel_size": (1, 2), "stride": (2, 3)}
        | {"output_padding": (1, 2)},
        (3, 32, 21, 22),
    ),
    "transposed, stride 1": (
        {"in_channels": 64, "out_channels": 64, "kernel_size": 3, "padding": 1},
        (4, 64, 32, 32),
    ),
    "transposed, strides differ": (
        {"in_channels": 48, "out_channels": 64, "kernel_size": (5, 4), "stride": (3, 1)}
        | {"padding": (2, 2), "output_padding": (1, 0)},
        (3, 48, 17, 40),
    ),
    "transposed, dilation and groups": (
        {"in_channels": 64, "out_channels": 32, "kernel_size": 3, "stride": 2, "dilation": 3}
        | {"padding": 3, "output_padding": 2, "groups": 2},
        (3, 64, 19, 20),
    ),
    "transposed, few channels": (
        {"in_channels": 64, "out_channels": 3, "kernel_size": 4, "stride": 2, "padding": 1},
        (8, 64, 64, 64),
    ),
    "transposed, deep": (
        {"in_channels": 512, "out_channels": 256, "kernel_size": 4, "stride": 2, "padding": 1},
        (8, 512, 8, 8),
    ),
    "transposed line": (
        {"in_channels": 64, "out_channels": 40, "kernel_size": 16, "stride": 8, "padding": 4},
        (6, 64, 250),
    ),
}


THIN: dict[str, tuple[dict[str, object], tuple[int, ...]]] = {
    "each channel": (
        {"in_channels": 96, "out_channels": 96, "kernel_size": 3, "padding": 1, "groups": 96},
        (8, 96, 57, 60),
    ),
    "groups of four": (
        {"in_channels": 64, "out_channels": 64, "kernel_size": 5, "padding": 2, "groups": 16},
        (4, 64, 30, 28),
    ),
    "three channels": (
        {"in_channels": 3, "out_channels": 40, "kernel_size": 3, "padding": 1},
        (4, 3, 100, 98),
    ),
    "three channels, 7x7, stride 2": (
        {"in_channels": 3, "out_channels": 64, "kernel_size": 7, "stride": 2, "padding": 3},
        (4, 3, 112, 112),
    ),
}


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    arguments, shape = (CONVOLUTIONS | TRANSPOSED | THIN)[name]
    plain, transposed = (nn.Conv2d, nn.ConvTranspose2d)
    if len(shape) == 3:
        plain, transposed = (nn.Conv1d, nn.ConvTranspose1d)  # type: ignore[assignment]
    layer = (transposed if name in TRANSPOSED else plain)(**arguments)  # type: ignore[arg-type]
    model = nn.Sequential(layer, nn.SiLU()).cuda()
    return model, torch.randn(shape, device="cuda")


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("name", [*CONVOLUTIONS, *TRANSPOSED])
def test_outputs_and_gradients_are_as_exact_as_eager(name: str, tf32: bool) -> None:
    torch.backends.cudnn.allow_tf32 = tf32
    model, x = model_of(name)
    fast = optimized_copy(model, x)
    mine, again = trained_on_gpu(fast, x), trained_on_gpu(fast, x)
    for y, same, e, d in zip(mine, again, *eager_and_exact(model, x), strict=True):
        assert torch.equal(y, same), "two runs, two results"
        assert error(y, d) <= max(1.1 * error(e, d), 4e-7)


@pytest.fixture
def staged_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are staged as fp16, wherever they fit."""
    monkeypatch.setattr(tensor_core, "prefers_staging", lambda *_: True)


NO_ROOM = "wide"  # for two stages of such long rows
NO_TAPS = "transposed, narrower than its stride"  # of some columns
STAGED = [name for name in (*CONVOLUTIONS, *TRANSPOSED) if name not in (NO_ROOM, NO_TAPS)]


@pytest.mark.parametrize("name", STAGED)
def test_staged_inputs(name: str, staged_first: None) -> None:
    torch.backends.cudnn.allow_tf32 = True
    model, x = model_of(name)
    fast = optimized_copy(model, x)
    assert "ByStagedInput<" in prepare(model, (x,), device=x.device).source.text
    mine, again = trained_on_gpu(fast, x), trained_on_gpu(fast, x)
    for y, same, e, d in zip(mine, again, *eager_and_exact(model, x), strict=True):
        assert torch.equal(y, same), "two runs, two results"
        assert error(y, d) <= max(1.1 * error(e, d), 4e-7)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def test_thin_convolutions_are_staged_where_tf32_is_allowed(
    direct_kernels: None, staged_first: None
) -> None:
    model, x = model_of("three channels, 7x7, stride 2")
    fast = optimized_copy(model, x)
    for tf32 in (True, False, True):
        torch.backends.cudnn.allow_tf32 = tf32
        for y, e, d in zip(trained_on_gpu(fast, x), *eager_and_exact(model, x), strict=True):
            assert error(y, d) <= max(1.1 * error(e, d), 4e-7)


@pytest.fixture
def direct_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the direct kernels wherever they fit."""
    for module in (convolutions, tensor_core):
        monkeypatch.setattr(module, "prefers_direct", lambda of, *_: conv_direct.fits(of))


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("name", THIN)
def test_thin_convolutions_are_as_exact_as_eager(
    name: str, tf32: bool, direct_kernels: None
) -> None:
    torch.backends.cudnn.allow_tf32 = tf32
    model, x = model_of(name)
    fast = optimized_copy(model, x)
    planned = prepare(model, (x,), device=x.device)
    kernel = "depthwise_convolution<FW" if name == "each channel" else "direct_convolution<FW"
    assert kernel in planned.source.text
    for y, e, d in zip(trained_on_gpu(fast, x), *eager_and_exact(model, x), strict=True):
        assert error(y, d) <= max(1.1 * error(e, d), 4e-7)
    if name.startswith("three") or not tf32:  # cuDNN's kernels for groups round otherwise
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tf32", [False, True])
def test_pytorchs_convolutions_in_channels_last(
    tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of convolutions that gain by it and stay PyTorch calls. Outputs have eager's
    layout."""
    monkeypatch.setattr(layouts, "LEAST_BYTES", 1)
    for each in ("is_worthwhile", "gradient_pays"):
        monkeypatch.setattr(convolutions, each, lambda *_: False)
    torch.backends.cudnn.allow_tf32 = tf32
    each, up = nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.ConvTranspose2d(96, 64, 2, stride=2)
    # No bias before a batch norm: its gradient would be nothing but rounding errors.
    one = nn.Conv2d(64, 96, 1, bias=False)
    layers = [nn.Conv2d(64, 64, 3, padding=1), nn.SiLU(), each, nn.SiLU(), one]
    model = nn.Sequential(*layers, nn.BatchNorm2d(96), nn.ReLU(), up, nn.Tanh()).cuda()
    x = torch.randn(4, 64, 31, 29, device="cuda")
    fast = optimized_copy(model, x)
    for y, e, d in zip(trained_on_gpu(fast, x), *eager_and_exact(model, x), strict=True):
        # Kernels of cuDNN's own, in either layout: as `verify` accepts them.
        assert y.stride() == e.stride() and error(y, d) <= max(2 * error(e, d), 4e-7)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_results_are_near_eager_where_both_use_tf32(name: str) -> None:
    torch.backends.cudnn.allow_tf32 = True
    model, x = model_of(name)
    with torch.no_grad():
        torch.testing.assert_close(optimized_copy(model, x)(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["sliced", "expanded"])
def test_strided_images_are_read_without_a_copy(layout: str) -> None:
    """Not channels-last images: for these eager's result is channels-last, and PyTorch computes
    it."""
    torch.backends.cudnn.allow_tf32 = False
    model, x = model_of("same")
    if layout == "sliced":
        x = torch.randn(6, 40, 30, 60, device="cuda")[:, 4:36, 1:-1, 2:-2:2]
    else:
        x = x[:1].expand(6, -1, -1, -1)
    planned = prepare(model, (x,), device=x.device).modes[0].inference
    assert any(step.kind == "convolution" for step in planned.steps)
    exact = copy.deepcopy(model).double()(x.double())
    assert error(optimized_copy(model, x)(x), exact) <= max(error(model(x), exact), 4e-7)


@pytest.mark.parametrize(("tf32", "staged"), [(False, False), (True, False), (True, True)])
def test_magnitudes_may_jump_between_images_and_channels(
    tf32: bool, staged: bool, request: pytest.FixtureRequest
) -> None:
    torch.backends.cudnn.allow_tf32 = tf32
    if staged:
        request.getfixturevalue("staged_first")
    arguments, _ = CONVOLUTIONS["deep"]
    model = nn.Conv2d(**arguments).cuda()  # type: ignore[arg-type]
    x = torch.randn(8, 512, 14, 14, device="cuda")
    # Positions near each other share a scale: next to 2^16 times larger ones bits would be lost.
    x *= torch.exp2(torch.randint(-6, 7, (8, 1, 1, 1), device="cuda").float())
    x[:, 200:] *= 2.0**12
    exact, eager, y = (
        copy.deepcopy(model).double()(x.double()),
        model(x),
        optimized_copy(model, x)(x),
    )
    for image in range(8):
        allowed = max(1.1 * error(eager[image], exact[image]), 4e-7)
        assert error(y[image], exact[image]) <= allowed


@pytest.mark.parametrize(("tf32", "staged"), [(False, False), (True, False), (True, True)])
def test_infinity_and_nan_are_where_eager_has_them(
    tf32: bool, staged: bool, request: pytest.FixtureRequest
) -> None:
    torch.backends.cudnn.allow_tf32 = tf32
    if staged:
        request.getfixturevalue("staged_first")
    model = nn.Conv2d(64, 64, 3, padding=1).cuda()
    x = torch.randn(3, 64, 20, 20, device="cuda")
    x[0, 3, 5, 5], x[1, 60, 0, 19], x[2, 1, 10, 10] = float("inf"), -float("inf"), float("nan")
    with torch.no_grad():
        model.weight[7, 8, 1, 1] = float("inf")
        eager, y = model(x), optimized_copy(model, x)(x)
    assert torch.equal(y.isnan(), eager.isnan()) and torch.equal(y.isinf(), eager.isinf())
    assert torch.equal(y[y.isinf()], eager[eager.isinf()])


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("name", ["transposed 3x3, stride 2", "transposed, strides differ"])
def test_infinity_and_nan_are_where_a_transposed_convolution_puts_them(
    name: str, tf32: bool
) -> None:
    """By its definition: no zeros at the edges meet an infinite weight."""
    torch.backends.cudnn.allow_tf32 = tf32
    (layer, _), x = model_of(name)  # type: ignore[misc]
    x[0, 3, 5, 5], x[1, 40, 0, -1], x[2, 1, 10, 10] = float("inf"), -float("inf"), float("nan")
    with torch.no_grad():
        layer.weight[7, 8, 0, 1], layer.weight[9, 2, -1, -1] = float("inf"), -float("inf")
        exact, y = (
            copy.deepcopy(layer).cpu().double()(x.cpu().double()),
            optimized_copy(layer, x)(x),
        )
    assert torch.equal(y.isnan().cpu(), exact.isnan())
    assert torch.equal(y.isinf().cpu(), exact.isinf())
    assert torch.equal(y[y.isinf()].cpu().double(), exact[exact.isinf()])


@pytest.mark.parametrize("name", ["stride 2", "1x1, stride 2", *TRANSPOSED])
def test_no_pass_of_a_strided_layer_is_left_to_pytorch(name: str) -> None:
    model, x = model_of(name)
    plans = prepare(model, (x,), device=x.device, modes=("train",)).modes[0]
    assert plans.backward is not None
    steps = (*plans.inference.steps, *plans.forward.steps, *plans.backward.steps)
    assert not any(isinstance(step, Call) for step in steps)


def test_the_tf32_flag_is_read_at_each_call() -> None:
    model, x = model_of("3x3")
    fast = optimized_copy(model, x)
    exact = copy.deepcopy(model).double()(x.double())
    found = []
    for allowed in (False, True, False):
        torch.backends.cudnn.allow_tf32 = allowed
        found.append(error(fast(x), exact))
    assert found[0] == found[2] < 1e-6 < found[1]


def test_our_convolution_is_in_the_plan() -> None:
    model, x = model_of("3x3")
    solution = prepare(model, (x,), device=x.device)
    steps = solution.modes[0].inference.steps
    assert [step.kind for step in steps] == ["convolution"]


def test_more_than_two_to_the_31_results() -> None:
    torch.backends.cudnn.allow_tf32 = True
    model = nn.Conv2d(16, 64, 1, bias=False).cuda()
    x = torch.randn(33, 16, 1024, 1024, device="cuda")
    with torch.no_grad():
        y = optimized_copy(model, x, modes=("eval",)).eval()(x)
        for image in (0, 32):
            expected = model(x[image : image + 1])
            torch.testing.assert_close(y[image : image + 1], expected, rtol=1e-4, atol=1e-4)
