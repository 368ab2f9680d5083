"""Models that change their own attributes when they are called, as people write them."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8
BATCH = 4


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)


class Cell(nn.Module):
    """A hidden state with its graph."""

    hidden: Any

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.zeros(BATCH, WIDTH)
        self.inner = nn.Linear(2 * WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.inner(torch.cat([x, self.hidden], 1)))
        y: Tensor = self.outer(self.hidden)
        return y


class DetachedOnRead(Cell):
    """Each step's graph ends at the state of the step before."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.inner(torch.cat([x, self.hidden.detach()], 1)))
        y: Tensor = self.outer(self.hidden)
        return y


class DetachedOnWrite(Cell):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(torch.cat([x, self.hidden], 1)))
        self.hidden = hidden.detach()
        y: Tensor = self.outer(hidden)
        return y


class MadeOnDemand(Cell):
    """No state before the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden = torch.zeros(x.size(0), WIDTH, device=x.device)
        return super().forward(x).relu()


class WrittenFirst(Cell):
    """The state is overwritten in place, moved, and replaced."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden.copy_(x.flip(1))
        self.hidden = self.hidden.to(x.device)
        return super().forward(x)


class Converted(Cell):
    """The first call finds another dtype than later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.ones(BATCH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.hidden.to(x)
        return super().forward(x)


class Average(_Layer):
    """A running mean that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(y.mean(0))
        return y - self.mean


class Accumulated(_Layer):
    """A sum with its graph, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = torch.zeros(BATCH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.sum.detach_()
        self.sum.mul_(0.5).add_(self.layer(x))
        return self.sum * 2


class Pair(nn.Module):
    """Two tensors in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.state = (torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH))
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, cell = self.cell(x, self.state)
        self.state = (hidden.detach(), cell.detach())
        y: Tensor = hidden
        return y


class Listed(nn.Module):
    """One state for each layer, in a list whose items are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(2)])
        self.states = [torch.zeros(BATCH, WIDTH) for _ in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            self.states[at] = torch.tanh(layer(torch.cat([x, self.states[at]], 1))).detach()
            x = self.states[at]
        return x * 2


class Memory(_Layer):
    """A state in a dict that is empty at first."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        before = self.memory.get("y")
        y: Tensor = self.layer(x if before is None else x + before)
        self.memory["y"] = y.detach()
        return y


class Nested(nn.Module):
    """Two cells as submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Cell(), DetachedOnWrite()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        return y


class Notes(_Layer):
    """What people keep to look at: counters, shapes, results, their list and their dict."""

    attention: Any
    shape: Any

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.samples = 0
        self.attention = None
        self.history: list[Tensor] = []
        self.last: deque[Tensor] = deque(maxlen=2)
        self.features: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.samples += x.shape[0]
        self.shape = x.shape
        y = self.layer(x)
        self.attention = torch.softmax(y, -1)
        self.history.append(y.detach())
        self.last.append(y.detach())
        self.features["y"] = y
        self.features["rows"] = x.size(0)
        seen: Tensor = self.attention * x
        return seen


class Difference(_Layer):
    """Keeps its own argument."""

    previous: Any

    def __init__(self) -> None:
        super().__init__()
        self.previous = None

    def forward(self, x: Tensor) -> Tensor:
        change = x if self.previous is None else x - self.previous
        self.previous = x
        y: Tensor = self.layer(change)
        return y


class Switching(_Layer):
    """Two kinds of call in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = False

    def forward(self, x: Tensor) -> Tensor:
        self.odd = not self.odd
        y: Tensor = self.layer(x)
        return y.relu() if self.odd else y.tanh()


class Masked(_Layer):
    """A mask that is made once for each batch size."""

    mask: Any

    def __init__(self) -> None:
        super().__init__()
        self.mask = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.size(0) != x.size(0):
            self.mask = torch.triu(torch.ones(x.size(0), WIDTH, device=x.device))
        y: Tensor = self.layer(x) * self.mask
        return y


class CountsTraining(_Layer):
    """Only training changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        y: Tensor = self.layer(x).relu()
        return y


class Sequence(nn.Module):
    """A whole LSTM that keeps its state."""

    state: Any

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.state = None

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.stack([x, x * 2, x.relu(), x.tanh(), x.exp(), x.sin()], 1)
        y, state = self.rnn(steps, self.state)
        self.state = tuple(each.detach() for each in state)
        last: Tensor = y[:, -1]
        return last


STATEFUL: tuple[type[nn.Module], ...] = (
    *(Cell, DetachedOnRead, DetachedOnWrite, MadeOnDemand, WrittenFirst, Converted, Average),
    *(Accumulated, Pair, Listed, Memory, Nested, Notes, Difference, Switching, Masked),
    *(CountsTraining, Sequence),
)
