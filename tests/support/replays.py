"""A stand-in for CUDA graphs on the CPU, as unforgiving as they are.

A capture computes nothing: what it returns is filled with garbage. A replay reads the buffers of
the graph and writes the results at the same places. It also overwrites what other graphs of the
same memory hold, because they may use the same pool.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.compile import replay, replayed


def spoil(tensors: list[Any]) -> None:
    for each in tensors:
        if isinstance(each, Tensor):
            each.fill_(float("nan") if each.is_floating_point() else 1)


class HostGraph:
    """What a capture recorded."""

    def __init__(self, memory: HostMemory, build: Callable[[], Any]) -> None:
        self.memory, self.build = memory, build
        self.buffers: list[Tensor] = []
        self.replays = 0
        tensors = inspect.getclosurevars(build).nonlocals["tensors"]
        before = [each.detach().clone() for each in tensors]
        with memory.machine.allocating(self.buffers, fresh=True):
            self.made = build()
        for each, old in zip(tensors, before, strict=True):
            if not torch.equal(each, old):
                each.detach().copy_(old)  # a capture writes nothing
        given, results = self.made
        taken = {each.untyped_storage().data_ptr() for each in given}
        self.own = [
            each if isinstance(each, Tensor) and not self._shares(each, taken) else None
            for each in results
        ]
        self.spoil()

    @staticmethod
    def _shares(tensor: Tensor, taken: set[int]) -> bool:
        return tensor.untyped_storage().data_ptr() in taken

    def spoil(self) -> None:
        spoil([*self.buffers, *self.own])

    def replay(self) -> None:
        for each in self.memory.graphs:
            if each is not self:
                each.spoil()
        with self.memory.machine.allocating(self.buffers, fresh=False), torch.inference_mode(False):
            _, results = self.build()
        for mine, found in zip(self.own, results, strict=True):
            if mine is not None:
                mine.copy_(found)
        self.replays += 1


class HostMemory:
    def __init__(self, machine: HostMachine) -> None:
        self.machine, self.lock = machine, threading.Lock()
        self.graphs: list[HostGraph] = []

    def begin(self) -> None:
        self.lock.acquire()

    def end(self) -> None:
        self.lock.release()

    def captured(self, build: Callable[[], Any]) -> tuple[HostGraph, Any]:
        if self.machine.failure is not None:
            raise self.machine.failure
        graph = HostGraph(self, build)
        self.graphs.append(graph)
        return graph, graph.made


class HostMachine:
    """Counts what happens. `capturing` and `settings` are for the tests to set."""

    def __init__(self) -> None:
        self.memories: dict[torch.device, HostMemory] = {}
        self.capturing = False
        self.settings: tuple[object, ...] = ()
        self.failure: Exception | None = None
        self._place = threading.local()

    def is_capturing(self) -> bool:
        return self.capturing

    def flags(self) -> tuple[object, ...]:
        return self.settings

    def memory(self, device: torch.device) -> HostMemory:
        return self.memories.setdefault(device, HostMemory(self))

    @property
    def graphs(self) -> list[HostGraph]:
        return [graph for each in self.memories.values() for graph in each.graphs]

    @property
    def replays(self) -> int:
        return sum(each.replays for each in self.graphs)

    @contextlib.contextmanager
    def allocating(self, buffers: list[Tensor], *, fresh: bool) -> Iterator[None]:
        """A capture makes buffers; a replay finds those of its capture."""
        known = iter(list(buffers))

        def like(tensor: Tensor) -> Tensor:
            if not fresh:
                return next(known)
            buffers.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype))
            return buffers[-1]

        self._place.like = like
        try:
            yield
        finally:
            del self._place.like

    def like(self, tensor: Tensor) -> Tensor:
        made: Tensor = self._place.like(tensor)
        return made


class HostMachines:
    """All machines that were made: one for each module, copy, and graph of Dynamo."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[HostMachine] = []
        monkeypatch.setattr(replayed, "CudaMachine", self._made)
        monkeypatch.setattr(replayed, "refusal", lambda plan: "")
        monkeypatch.setattr(replay, "_like", self._like)

    def _made(self) -> HostMachine:
        self.all.append(HostMachine())
        return self.all[-1]

    def _like(self, tensor: Tensor) -> Tensor:
        machine = next(each for each in self.all if hasattr(each._place, "like"))
        return machine.like(tensor)

    @property
    def captures(self) -> int:
        return sum(len(each.graphs) for each in self.all)

    @property
    def replays(self) -> int:
        return sum(each.replays for each in self.all)
