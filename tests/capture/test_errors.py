"""What cannot be captured: one named error, the user's innermost line, and what to do about it."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.errors import CaptureError

GENERATOR = torch.Generator()


def largest(x: Tensor) -> float:
    return x.max().item()  # the line: item


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0] * 2  # the line: mask


class Places(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found = x.nonzero()  # the line: nonzero
        return found * 2


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * largest(x)


class Told(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return x * 2, largest(x)


class NoForward(nn.Module):  # the line: class
    ...


class Stepping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1  # the line: step
        return x / self.step


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Stepping()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Remembering(nn.Module):
    """Reads a list that grows with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)  # the line: seen
        return torch.stack(self.seen).sum(0)


class Meter:
    total = 0

    def __init__(self) -> None:
        self.total = 0


class Measuring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        self.meter.total += 1  # the line: meter
        return x


class Setting(nn.Module):
    kind: Any

    def forward(self, x: Tensor) -> Tensor:
        self.kind = Meter  # the line: kind
        return x


class Registering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(10))  # the line: table
        return x * 2


class Deleting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = 3

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "first"):
            del self.first  # the line: del
        return x * 2


class Reassigning(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = x.sum()  # the line: buffer
        return x * self.scale


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)  # the line: linear
        return y


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # the line: sum
        return x + y


class Choosing(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # the line: cond


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bernoulli(x, generator=GENERATOR)  # the line: bernoulli


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=GENERATOR)  # the line: rand


REFUSED: dict[type[nn.Module], tuple[str, str]] = {
    Masked: ("mask", "depends on the values of a tensor.*torch.where"),
    Places: ("nonzero", "depends on the values of a tensor"),
    Scaled: ("item", "depends on the values of a tensor"),
    Told: ("item", "depends on the values of a tensor"),
    NoForward: ("class", "NoForward: it has no forward"),
    Stepping: ("step", "reads the attribute step, which is different at each call.*keep it in a"),
    Holding: ("step", "reads the attribute inner.step"),
    Remembering: ("seen", "reads the attribute seen, which is different at each call"),
    Measuring: ("meter", r"changes the attribute meter \(a Meter\).*make it a buffer"),
    Setting: ("kind", "sets the attribute kind to a type; keep tensors, numbers"),
    Registering: ("table", "adds, removes or replaces the buffer table.*in the constructor"),
    Deleting: ("del", "deletes the attribute first.*set it to None"),
    Reassigning: ("buffer", "assigns the buffer scale"),
    Narrow: ("linear", r"\[5, 10\] X \[3, 4\]"),
    Sum: ("sum", "missing 1 required positional argument: 'y'; pass the arguments"),
    Choosing: ("cond", r"the operator (cond|\(torch.cond or).* not supported; use"),
    Drawing: ("bernoulli", "takes a torch.Generator.*leave `generator=` out"),
    Noisy: ("rand", "takes a torch.Generator"),
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_refusal_names_the_users_innermost_line(kind: type[nn.Module], mode: str) -> None:
    mark, words = REFUSED[kind]
    lines = Path(__file__).read_text().split("\n")
    line = 1 + next(n for n, text in enumerate(lines) if text.endswith(f"# the line: {mark}"))
    model = kind()
    before = dict(vars(model))
    with pytest.raises(CaptureError, match=rf"^{__file__}:{line}: cannot.*{words}") as raised:
        capture(model, (torch.rand(5, 10),), mode=mode)
    assert str(raised.value).endswith(lines[line - 1].strip())
    assert vars(model) == before, "the search for the line leaves the model alone"


def test_pytorchs_own_traceback_is_not_printed() -> None:
    heard: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    log, handler = logging.getLogger("torch._subclasses.fake_tensor"), Listening()
    log.addHandler(handler)
    try:
        with pytest.raises(CaptureError):
            capture(Narrow(), (torch.rand(5, 10),), mode="eval")
        assert not heard
        log.error("still there for others")
        assert heard == ["still there for others"]
    finally:
        log.removeHandler(handler)


def test_a_model_of_pytorchs_own_has_no_line_to_name() -> None:
    assert inspect.getsourcefile(nn.Linear) != __file__
    with pytest.raises(CaptureError, match=r"^cannot capture Linear: RuntimeError"):
        capture(nn.Linear(3, 4), (torch.rand(5, 10),), mode="eval")
