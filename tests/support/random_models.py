"""Random models for property tests: a seed gives a small program over broadcast tensors.

Each program draws inputs and parameters of compatible shapes, applies a handful of operators
(arithmetic, activations, comparisons, reductions, normalisations, views) and returns up to three
results. The same seed gives the same program and the same values.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 33, 65)


def most_elements() -> int:
    """Not a global number: for a model that Dynamo cannot trace, those are left to Dynamo."""
    return 20_000


Step = Callable[[list[Tensor]], Tensor]

UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    torch.sigmoid,
    torch.tanh,
    F.gelu,
    F.silu,
    F.softplus,
    F.elu,
    F.hardswish,
    F.leaky_relu,
    F.mish,
    torch.abs,
    torch.neg,
    torch.sin,
    torch.cos,
    torch.atan,
    torch.erf,
    lambda t: torch.exp(-t.abs()),
    lambda t: torch.log(t.abs() + 0.5),
    lambda t: torch.sqrt(t.abs() + 0.1),
    lambda t: torch.rsqrt(t * t + 0.5),
    lambda t: t**2,
    lambda t: t**3,
    lambda t: t.clamp(-0.8, 0.9),
    lambda t: 1.0 / (1.5 + t.abs()),
    lambda t: t * 2 - 1,
    lambda t: F.gelu(t, approximate="tanh"),
)
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    torch.minimum,
    lambda a, b: a / (b.abs() + 1.0),
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: torch.where((a > 0) & (b < 0.3), a, b),
    lambda a, b: torch.add(a, b, alpha=0.5),
    lambda a, b: torch.lerp(a, b.expand_as(a) if b.shape != a.shape else b, 0.3),
    lambda a, b: a.masked_fill(b > 0.5, 0.25),
    lambda a, b: torch.atan2(a, b.abs() + 0.5),
    lambda a, b: torch.hypot(a, b + 2.0),
)
REDUCE: tuple[Callable[[Tensor, list[int], bool], Tensor], ...] = (
    lambda t, d, k: t.sum(d, keepdim=k),
    lambda t, d, k: t.mean(d, keepdim=k),
    lambda t, d, k: t.amax(d, keepdim=k),
    lambda t, d, k: t.amin(d, keepdim=k),
    lambda t, d, k: t.var(d, keepdim=k, unbiased=False),
    lambda t, d, k: (t.var(d, keepdim=k, unbiased=False) + 0.1).sqrt(),
    lambda t, d, k: torch.logsumexp(t, d, keepdim=k),
)


class RandomModel(nn.Module):
    """The program of one seed. `inputs()` draws arguments for it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.rng = random.Random(seed)
        rank = self.rng.randint(1, 4)
        self.shape = self._shape(rank)
        self.input_shapes = [self.shape]
        self.input_shapes += [self._narrowed(batch=True) for _ in range(self.rng.randint(0, 2))]
        torch.manual_seed(seed)
        count = self.rng.randint(0, 3)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(self._narrowed(batch=False))) for _ in range(count)
        )
        self.program = self.rng.getrandbits(64)
        self.length = self.rng.randint(3, 12)

    def _shape(self, rank: int) -> list[int]:
        shape = [self.rng.choice(SIZES[1:])] + [self.rng.choice(SIZES) for _ in range(rank - 1)]
        while torch.Size(shape).numel() > most_elements():
            largest = shape.index(max(shape))
            shape[largest] = max(2, shape[largest] // 2)
        return shape

    def _narrowed(self, *, batch: bool) -> list[int]:
        """A shape that broadcasts to the main one."""
        kept = [size if self.rng.random() < 0.6 else 1 for size in self.shape]
        if batch:
            kept[0] = self.shape[0]
            return kept
        kept[0] = 1
        return kept[self.rng.randint(0, len(kept)) :] if self.rng.random() < 0.5 else kept

    def inputs(self, seed: int | None = None) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        return tuple(torch.randn(shape, generator=generator) for shape in self.input_shapes)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        rng = random.Random(self.program)
        pool: list[Tensor] = [*inputs, *self.weights]
        made: list[Tensor] = []
        for _ in range(self.length):
            value = self._step(rng, [*pool, *made])
            if 0 < value.numel() <= 4 * most_elements():
                made.append(value)
        results = [made[-1]]
        for value in made[:-1]:
            if rng.random() < 0.15 and len(results) < 3:
                results.append(value)
        return tuple(results)

    def _step(self, rng: random.Random, pool: list[Tensor]) -> Tensor:
        recent = pool[-4:] if rng.random() < 0.7 else pool
        value = rng.choice(recent)
        kind = rng.random()
        if kind < 0.30:
            return rng.choice(UNARY)(value)
        if kind < 0.62:
            other = rng.choice(pool)
            if not _broadcasts(value, other):
                other = rng.choice(UNARY)(value)
            return rng.choice(BINARY)(*_larger_first(value, other))
        if kind < 0.80 and value.dim() > 0:
            dims = sorted(rng.sample(range(value.dim()), rng.randint(1, value.dim())))
            return rng.choice(REDUCE)(value, dims, rng.random() < 0.6)
        if kind < 0.88 and value.dim() > 0:
            return rng.choice(_NORMALISE)(value, rng.randrange(value.dim()))
        return _view(rng, value)


_NORMALISE: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda t, d: F.softmax(t, d),
    lambda t, d: F.log_softmax(t, d),
    lambda t, d: F.layer_norm(t, t.shape[-1:]),
    lambda t, d: F.normalize(t, dim=d),
    lambda t, d: (t - t.mean(d, keepdim=True)) / (t.std(d, keepdim=True, unbiased=False) + 0.1),
)


def _broadcasts(left: Tensor, right: Tensor) -> bool:
    pairs = zip(reversed(left.shape), reversed(right.shape), strict=False)
    return all(a == b or b == 1 or a == 1 for a, b in pairs)


def _larger_first(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(left.shape, right.shape)
    if left.shape == shape:
        return left, right
    return (right, left) if right.shape == shape else (left.expand(shape), right)


def _view(rng: random.Random, value: Tensor) -> Tensor:
    """One of the ways to look at the same elements."""
    kind = rng.randrange(6)
    if kind == 0 and value.dim() > 1:
        return value.permute(rng.sample(range(value.dim()), value.dim()))
    if kind == 1:
        return value.unsqueeze(rng.randint(0, value.dim()))
    if kind == 2 and value.dim() > 1:
        return value.flatten(rng.randint(0, value.dim() - 2))
    if kind == 3 and value.dim() > 0 and value.shape[-1] > 2:
        return value[..., 1 : value.shape[-1] - (rng.random() < 0.5)]
    if kind == 4 and value.dim() > 1 and value.shape[-1] % 2 == 0:
        return value.reshape(*value.shape[:-1], 2, value.shape[-1] // 2)
    if kind == 5 and value.dim() > 0 and value.shape[-1] > 3:
        return value[..., ::2]
    return value * 1.5


class Several(nn.Module):
    """Many random programs as one model, so that one compiler run serves them all."""

    def __init__(self, seeds: list[int]) -> None:
        super().__init__()
        self.seeds = seeds
        self.parts = nn.ModuleList(RandomModel(seed) for seed in seeds)

    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.inputs())  # type: ignore

    def forward(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        results = []
        for part in self.parts:
            count = len(part.input_shapes)  # type: ignore[arg-type]
            results.append(part(*inputs[:count]))
            inputs = inputs[count:]
        return tuple(results)
