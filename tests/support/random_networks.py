"""Random networks as people write them: a layer, then activations, norms, pools, reductions and
more layers of fitting sizes. The same seed gives the same network."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_ELEMENTS = 40_000  # of any value
LARGEST = 1e4  # so that 16-bit floats hold all values
TRIES = 16
Draw = Callable[[random.Random, torch.Size], nn.Module]


class Applied(nn.Module):
    """A function, with a parameter if it is given one."""

    def __init__(
        self, name: str, function: Callable[..., Tensor], weight: Tensor | None = None
    ) -> None:
        super().__init__()
        self.name, self.function = name, function
        self.weight = None if weight is None else nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) if self.weight is None else self.function(x, self.weight)

    def extra_repr(self) -> str:
        return self.name if self.weight is None else f"{self.name}, {tuple(self.weight.shape)}"


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    **{each.__name__: each for each in (F.relu, F.gelu, F.silu, F.mish, F.hardswish, F.elu)},
    **{each.__name__: each for each in (F.hardsigmoid, F.softplus, F.selu, F.softsign, F.relu6)},
    **{each.__name__: each for each in (torch.sigmoid, torch.tanh, torch.abs, torch.square)},
    "leaky_relu": lambda t: F.leaky_relu(t, 0.02),
    "hardtanh": lambda t: F.hardtanh(t, -0.7, 0.9),
    "swish": lambda t: t * torch.sigmoid(t),
    "clamp": lambda t: torch.clamp(t, -1.0, 0.6),
    "min of a constant": lambda t: torch.min(t, torch.tensor(0.4, dtype=t.dtype)),
    "scale": lambda t: t * 2.0,
    "divide": lambda t: t / 1.7,
    "subtract": lambda t: 0.5 - t,
    "where": lambda t: torch.where(t > 0, t, t * 0.1),
}
REDUCE: dict[str, Callable[[Tensor, tuple[int, ...], bool], Tensor]] = {
    "mean": lambda t, d, k: t.mean(d, keepdim=k),
    "sum": lambda t, d, k: t.sum(d, keepdim=k) * 0.2,
    "amax": lambda t, d, k: t.amax(d, keepdim=k),
    "amin": lambda t, d, k: t.amin(d, keepdim=k),
    "logsumexp": lambda t, d, k: t.logsumexp(d, keepdim=k),
    "max of the first": lambda t, d, k: t.max(d[0], keepdim=k)[0],
}
RESHAPE: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda t: t.flatten(1),
    "transpose": lambda t: t.transpose(1, -1),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "pad": lambda t: F.pad(t, (1, 2)),
    "every second": lambda t: t[:, ::2],
    "roll": lambda t: t.roll(1, -1),
    "cumsum": lambda t: t.cumsum(-1) * 0.3,
    "chunk": lambda t: t.chunk(2, 1)[0],
    "residual": lambda t: t + t.sigmoid(),
    "concatenate": lambda t: torch.cat([t, t * 2], 1),
    "stack": lambda t: torch.stack([t, t.tanh()]).sum(0),
    "flip": lambda t: t + t.flip(-1),
    "scaled by its mean": lambda t: t * t.mean(),
}


def _named(rng: random.Random, table: dict[str, Callable[[Tensor], Tensor]]) -> nn.Module:
    name = rng.choice(list(table))
    return Applied(name, table[name])


def _parameter(rng: random.Random, shape: torch.Size) -> nn.Module:
    shapes = [(shape[1], *(1 for _ in shape[2:])), (shape[-1],), (1,), (), tuple(shape[1:])]
    weight = 0.5 * torch.randn(rng.choice(shapes))
    name, function = rng.choice([("add", torch.add), ("mul", torch.mul), ("rsub", torch.rsub)])
    return Applied(name, function, weight)


def _norm(rng: random.Random, shape: torch.Size) -> nn.Module:
    channels, affine, space = shape[1], rng.random() < 0.7, len(shape) - 2
    by_channel = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[space]
    by_image = (nn.InstanceNorm1d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[space]
    groups = rng.choice([each for each in (1, 2, 3, 4, 8) if channels % each == 0])
    axis, last = rng.randrange(1, len(shape)), rng.randint(1, len(shape) - 1)
    choices: list[Callable[[], nn.Module]] = [
        lambda: by_channel(channels, momentum=rng.choice([0.1, 0.3]), affine=affine),
        lambda: nn.GroupNorm(groups, channels, affine=affine),
        lambda: nn.LayerNorm(shape[-last:]),
        lambda: by_image(channels, affine=affine),
        lambda: nn.RMSNorm(shape[-1]),
        lambda: nn.Softmax(axis),
        lambda: nn.LogSoftmax(axis),
        lambda: Applied(f"normalize {axis}", lambda t: F.normalize(t, dim=axis)),
    ]
    return rng.choice(choices)()


def _pool(rng: random.Random, shape: torch.Size) -> nn.Module:
    space = len(shape) - 3
    window = {"kernel_size": rng.choice([2, 2, 3]), "stride": rng.choice([None, 1, 2, 3])}
    window |= {"padding": rng.choice([0, 0, 1]), "ceil_mode": rng.random() < 0.2}
    size = rng.choice([1, 1, 2, 3])
    choices: list[Callable[[], nn.Module]] = [
        lambda: (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[space](**window),
        lambda: (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[space](**window),
        lambda: (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[space](size),
        lambda: (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)[space](size),
    ]
    return rng.choice(choices)()


def _reduction(rng: random.Random, shape: torch.Size) -> nn.Module:
    axes = range(1, len(shape))
    dims = tuple(sorted(rng.sample(axes, rng.randint(1, len(axes)))))
    name, keep, centred = rng.choice(list(REDUCE)), rng.random() < 0.5, rng.random() < 0.3
    if centred:
        return Applied(f"less {name} {dims}", lambda t: t - REDUCE[name](t, dims, True))
    return Applied(f"{name} {dims}", lambda t: REDUCE[name](t, dims, keep))


def _linear(rng: random.Random, shape: torch.Size) -> nn.Module:
    return nn.Linear(shape[-1], rng.randint(1, 80), bias=rng.random() < 0.8)


def _convolution(rng: random.Random, shape: torch.Size) -> nn.Module:
    """A convolution, transposed or not; not all settings go together."""
    space, channels, results = len(shape) - 3, shape[1], rng.choice([1, 2, 4, 5, 8, 12, 16, 24])
    groups = rng.choice([1, 1, 1, 1, 2, channels])
    groups = 1 if channels % groups or results % groups else groups
    sizes = [rng.choice([1, 2, 3, 3, 4, 5]) for _ in range(space + 1)]
    window = sizes if rng.random() < 0.4 else sizes[:1] * (space + 1)
    step, dilation = rng.choice([1, 1, 1, 2, 3]), rng.choice([1, 1, 1, 2])
    how = {"padding": rng.choice([0, 1, 1, 2]), "stride": step, "dilation": dilation}
    how |= {"groups": groups, "bias": rng.random() < 0.8}
    if rng.random() < 0.4:
        more = rng.choice([0, 0, 1]) if max(step, dilation) > 1 else 0
        kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        return kinds[space](channels, results, window, output_padding=more, **how)  # type: ignore
    how["padding_mode"] = rng.choice([*["zeros"] * 5, "reflect", "circular", "replicate"])
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[space](channels, results, window, **how)  # type: ignore


def _itself(rng: random.Random, shape: torch.Size) -> nn.Module:
    return Applied("times its transpose", lambda t: 0.2 * (t @ t.transpose(-2, -1)))


GROW: tuple[Draw, ...] = (
    *[lambda rng, shape: _named(rng, POINTWISE)] * 6,
    *[lambda rng, shape: _named(rng, RESHAPE)] * 3,
    *[_parameter] * 3,
    *[_norm] * 4,
    *[_pool] * 2,
    *[_reduction] * 4,
    _linear,
    _convolution,
)
START: dict[int, tuple[Draw, ...]] = {  # by the number of dimensions
    2: (_linear,),
    3: (_linear, _itself, _convolution, _norm),
    4: (_convolution, _convolution, _convolution, _norm, _pool),
    5: (_convolution, _convolution, _reduction),
}


class RandomNetwork(nn.Module):
    """The network of a seed. `inputs` draws its argument, with any batch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, rng = seed, random.Random(seed)
        torch.manual_seed(seed)
        self.shape = _input_shape(rng)
        self.layers = nn.Sequential()
        x = self._grown(rng, self.inputs(self.shape[0]), START[len(self.shape)])
        for _ in range(rng.randint(2, 6)):
            if x.dim() > 1:
                x = self._grown(rng, x, GROW)
        for each in self.modules():
            if isinstance(each, nn.modules.batchnorm._BatchNorm):
                each.reset_running_stats()

    def _grown(self, rng: random.Random, x: Tensor, draws: Sequence[Draw]) -> Tensor:
        """The result of one more layer, the first that fits."""
        for _ in range(TRIES):
            try:
                layer = rng.choice(draws)(rng, x.shape)
                y: Tensor = layer(x)
            except (RuntimeError, ValueError, IndexError):
                continue  # PyTorch refuses it for this shape
            if 0 < y.numel() <= MOST_ELEMENTS and y.dim() <= 5 and y.abs().max() < LARGEST:
                self.layers.append(layer)
                return y.detach()
        return x

    def inputs(self, batch: int) -> Tensor:
        return torch.randn(batch, *self.shape[1:], generator=torch.Generator().manual_seed(batch))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def _input_shape(rng: random.Random) -> tuple[int, ...]:
    rank, batch = rng.choice([2, 3, 3, 4, 4, 4, 5]), rng.randint(2, 6)
    if rank == 2:
        return (batch * rng.randint(1, 6), rng.randint(3, 80))
    channels, most = rng.choice([1, 3, 4, 6, 8, 12, 16]), {3: 40, 4: 14, 5: 7}[rank]
    return (batch, channels, *(rng.randint(4, most) for _ in range(rank - 2)))
