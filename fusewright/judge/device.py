"""Where a candidate's tensors lie, and who takes the time; here, the host. `cuda` is the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from fusewright.judge.arena import Arena
from fusewright.judge.guarded import Form, Guarded, room

Results = Callable[[], Iterable[Tensor]]


class Placed(Protocol):
    """Memory for one tensor that the judge writes."""

    def view(self) -> Tensor: ...
    def stage(self) -> None: ...
    def load(self) -> None: ...
    def store(self) -> None: ...


class Device(Protocol):
    """Gives memory, and takes the time of a call where the parent's clock is too coarse.

    `is_separate`: its memory is not the host's, so results are copied when the clock has stopped.
    `poison` fills memory that results are likely to get. `busy`: the device works before it gets
    the inputs, so that no other stream can be on time by luck. `stop` takes the results as the
    next work on the default stream finds them, and `seen` gives them. `aside`: another stream is
    the current one, and takes the place of the default one. `damaged` names memory beside which a
    call has written.
    """

    kind: str
    is_separate: bool

    def moved(self, model: nn.Module) -> nn.Module: ...
    def guarded(self, form: Form) -> Guarded: ...
    def placed(self, arena: Arena, offset: int, form: Form, shift: int = 0) -> Placed: ...
    def seed(self, number: int) -> None: ...
    def random_state(self) -> Tensor: ...
    def poison(self, wanted: bool) -> None: ...
    def aside(self, wanted: bool) -> AbstractContextManager[object]: ...
    def start(self, *, busy: bool) -> None: ...
    def stop(self, results: Results) -> dict[str, float]: ...
    def seen(self, tensor: Tensor) -> Tensor: ...
    def damaged(self) -> list[str]: ...


class HostPlaced:
    """A tensor in the judge's memory itself: nothing is copied."""

    def __init__(self, guarded: Guarded) -> None:
        self._guarded = guarded

    def view(self) -> Tensor:
        return self._guarded.view()

    def stage(self) -> None: ...

    def load(self) -> None: ...

    def store(self) -> None: ...


class Host:
    """The CPU; the parent's clock counts."""

    kind = "cpu"
    is_separate = False

    def moved(self, model: nn.Module) -> nn.Module:
        return model

    def guarded(self, form: Form) -> Guarded:
        return Guarded(form)

    def placed(self, arena: Arena, offset: int, form: Form, shift: int = 0) -> HostPlaced:
        return HostPlaced(Guarded(form, arena.bytes_at(offset, room(form)), shift))

    def seed(self, number: int) -> None:
        # torch.manual_seed also leaves a note for every GPU, which takes ten times as long.
        torch.default_generator.manual_seed(number)

    def random_state(self) -> Tensor:
        return torch.default_generator.get_state()

    def poison(self, wanted: bool) -> None: ...

    def aside(self, wanted: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def start(self, *, busy: bool) -> None: ...

    def stop(self, results: Results) -> dict[str, float]:
        return {}

    def seen(self, tensor: Tensor) -> Tensor:
        return tensor

    def damaged(self) -> list[str]:
        return []
