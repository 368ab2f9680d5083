"""How long capture, rewriting, planning, scheduling and rendering take, over the size of a model.

    python tools/planning_time.py                                # processor seconds of each stage
    python tools/planning_time.py --kinds chain --blocks 4 8 16 32 64 128
    python tools/planning_time.py --calls                        # function calls instead of seconds

Each kind of model is a row of equal blocks. Every stage should take time in proportion to their
number: the last column is the exponent of the best power law. Seconds depend on the machine and on
what else it does; function calls do not.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fusewright.capture import capture
from fusewright.compile.pipeline import MODES, shared_kernels
from fusewright.compile.planning import plan_programs
from fusewright.compile.stages import Stages, collecting_rarely
from fusewright.kinds.registry import heuristic, render
from fusewright.target.target import Target

STAGES = ("capture", "rewrite", "plan", "schedule", "render")
BLOCKS = (4, 8, 16, 32, 64)
CHANNELS = 64
SMALL = 1e-3  # seconds that are not worth a fit


class Convolution(nn.Sequential):
    """Convolution, batch norm and ReLU."""

    def __init__(self) -> None:
        layer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        super().__init__(layer, nn.BatchNorm2d(CHANNELS), nn.ReLU())


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Convolution(), nn.Sequential(*[*Convolution()][:2])

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.first(x)) + x)


class Transformer(nn.Module):
    """Attention and two linear layers, each after a layer norm and beside an identity."""

    def __init__(self, features: int = 256) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(features), nn.LayerNorm(features)
        self.parts, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts(self.first(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in parts)
        seen = torch.softmax(q @ k.transpose(-1, -2) / 8.0, -1) @ v
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Recurrent(nn.Module):
    """A recurrent net as a Python loop over its steps."""

    def __init__(self, steps: int, features: int = 256) -> None:
        super().__init__()
        self.steps = steps
        self.inner, self.outer = nn.Linear(features, features), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        states = []
        for step in range(self.steps):
            state = torch.tanh(self.inner(x[:, step]) + self.outer(state))
            states.append(state)
        return torch.stack(states, 1)


def _images() -> Tensor:
    return torch.empty(32, CHANNELS, 56, 56)


def _row(block: Callable[[], nn.Module], given: Callable[[], Tensor]) -> Callable[[int], Made]:
    return lambda count: (nn.Sequential(*(block() for _ in range(count))), given())


Made = tuple[nn.Module, Tensor]
KINDS: dict[str, Callable[[int], Made]] = {
    "chain": _row(Convolution, _images),
    "residual": _row(Residual, _images),
    "transformer": _row(Transformer, lambda: torch.empty(8, 128, 256)),
    "recurrent": lambda count: (Recurrent(count), torch.empty(32, count, 256)),
}
TARGETS: dict[str, Callable[[], Target]] = {"cuda": Target.cuda, "host": Target.host}


class CallCounter:
    """A clock that counts the function calls so far, of Python and of C."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def __call__(self) -> float:
        self._profile.disable()
        total = sum(entry.callcount for entry in self._profile.getstats())
        self._profile.enable()
        return float(total)

    def stop(self) -> None:
        self._profile.disable()


def measure(
    kind: str, blocks: int, target: Target, modes: Sequence[str], clock: Callable[[], float]
) -> dict[str, float]:
    """What each stage takes, by this clock."""
    model, given = KINDS[kind](blocks)
    stages = Stages(clock=clock)
    with collecting_rarely():
        with stages.timed("capture"):
            programs = [capture(model, (given,), mode=mode) for mode in modes]
        _, sized = shared_kernels(plan_programs(programs, target, stages))
        with stages.timed("schedule"):
            kernels = [(each, heuristic(each, target, sizes)) for each, sizes in sized]
        with stages.timed("render"):
            render(kernels, target)
    return stages.seconds


def exponent(sizes: Sequence[int], found: Sequence[float]) -> float:
    """The exponent of the power law that fits best: a line through the logarithms."""
    x, y = [math.log(each) for each in sizes], [math.log(each) for each in found]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return slope / sum((a - mean_x) ** 2 for a in x)


def table(kind: str, sizes: Sequence[int], found: Sequence[dict[str, float]], digits: int) -> str:
    lines = [f"{kind:12}" + "".join(f"{size:>12}" for size in sizes) + "    exponent"]
    for stage in STAGES:
        row = [each[stage] for each in found]
        fit = f"{exponent(sizes, row):12.2f}" if len(sizes) > 1 and min(row) > SMALL else ""
        lines.append(f"  {stage:10}" + "".join(f"{cost:12.{digits}f}" for cost in row) + fit)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of the stages over the size of a model.")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--blocks", nargs="+", type=int, default=[*BLOCKS])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--target", choices=TARGETS, default="cuda")
    parser.add_argument("--calls", action="store_true", help="count function calls, not seconds")
    given = parser.parse_args()
    target = TARGETS[given.target]()
    measure("chain", 2, target, given.modes, time.process_time)  # PyTorch loads parts of itself
    for kind in given.kinds:
        found = []
        for blocks in given.blocks:
            counter = CallCounter() if given.calls else None
            found.append(measure(kind, blocks, target, given.modes, counter or time.process_time))
            if counter is not None:
                counter.stop()
        print(table(kind, given.blocks, found, 0 if given.calls else 2), flush=True)


if __name__ == "__main__":
    main()
