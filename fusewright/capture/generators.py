"""What a forward does to random generators, while other threads may draw from them, too.

PyTorch's default generators belong to the whole process. So they are not seeded for the watch, and
they are put back only if this thread has used them.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusewright.errors import UnguardedError

_SETTING = frozenset({"manual_seed", "seed", "set_state"})


def gpu_generators() -> tuple[Any, ...]:
    """The generators of all GPUs, if they are in use."""
    used: Callable[[], bool] = torch.cuda.is_initialized
    return tuple(torch.cuda.default_generators) if used() else ()


class Generators:
    """The generators before a forward, and what this thread has asked of them since."""

    def __init__(self) -> None:
        self.ours = (torch.default_generator, *gpu_generators())
        self.states = [each.get_state() for each in self.ours]
        self.seeds = [each.initial_seed() for each in self.ours]
        self.python, self.numpy = random.getstate(), _numpy_state()
        self.asked = self.was_set = self.moved = False

    def drew(self) -> bool:
        """Whether PyTorch's generators went on. Other uses are refused."""
        if self.was_set or self.seeds != [each.initial_seed() for each in self.ours]:
            raise UnguardedError("forward seeds a random generator, or sets its state")
        if random.getstate() != self.python:
            raise UnguardedError("forward draws random numbers from Python's random")
        if _text(_numpy_state()) != _text(self.numpy):
            raise UnguardedError("forward draws random numbers from numpy.random")
        went_on = self.asked and self.differ_from(self.states)
        if self.moved and not went_on:
            raise UnguardedError("forward draws random numbers and puts the generator back")
        return went_on

    def differ_from(self, states: list[torch.Tensor]) -> bool:
        pairs = zip(self.ours, states, strict=True)
        return any(not torch.equal(each.get_state(), old) for each, old in pairs)

    def put_back(self) -> None:
        for each, state in zip(self.ours, self.states, strict=True):
            if self.asked or self.was_set:
                each.set_state(state)
        if random.getstate() != self.python:
            random.setstate(self.python)
        if _text(_numpy_state()) != _text(self.numpy):
            sys.modules["numpy"].random.set_state(self.numpy)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _text(state: Any) -> str:
    return "" if state is None else f"{state[0]}{state[1].tobytes()!r}{state[2:]}"


@contextlib.contextmanager
def watched_generators() -> Iterator[Generators]:
    """Watch the generators while the block runs, and put them back afterwards."""
    generators = Generators()
    noted: Any = _Noted(generators)
    try:
        with patch.object(torch.random, "default_generator", noted), _Draws(generators):
            yield generators
    finally:
        generators.put_back()


@contextlib.contextmanager
def restored_generators() -> Iterator[None]:
    """Put the generators back after a block that may draw, and that no mode may watch."""
    generators = Generators()
    try:
        yield
    finally:
        generators.asked = True
        generators.put_back()


class _Noted:
    """PyTorch's default generator, for its own functions. It notes that this thread sets it."""

    def __init__(self, generators: Generators) -> None:
        self._generators, self._thread = generators, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in _SETTING and threading.get_ident() == self._thread:
            self._generators.was_set = True
        return getattr(torch.default_generator, name)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes that this thread runs an operator that may draw, and whether it did.

    Attention without dropout may draw by its tag, and draws nothing.
    """

    def __init__(self, generators: Generators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = generators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        generators = self._generators
        generators.asked = True
        before = [each.get_state() for each in generators.ours]
        result = func(*args, **(kwargs or {}))
        generators.moved = generators.moved or generators.differ_from(before)
        return result
