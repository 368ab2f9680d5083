"""CUDA graphs of one function of tensors: for which calls there is one, and how a call replays it.

The first call of a kind runs as usual, which warms up. The second one is captured, and from then on
calls are replayed. Arguments are copied into the memory of the graph, but for parameters and
buffers, whose addresses are compared. Results are copied out, so a later call changes none of them
and autograd may keep them as long as it likes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from fusewright import debug
from fusewright.compile.cuda_graphs import Launched, Machine, Memory
from fusewright.errors import first_line
from fusewright.runtime import guard, library

# A function of the tensors in a list, which it may empty.
Run = Callable[[list[Any]], Sequence[Any]]
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
# Which of these tensors stay where they are between calls: parameters and buffers.
Held = Callable[[Sequence[Tensor]], Sequence[bool]]

# Further kinds of calls, or sizes, run as usual.
MOST_GRAPHS = 8
# A model whose parameters move at each call would be captured again and again.
MOST_CAPTURES = 32
# The kinds of calls that are remembered, to capture the second one.
MOST_KINDS = 64

_same_addresses: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class NotReplayedError(RuntimeError):
    """A call cannot be captured, for this reason."""


@dataclass(frozen=True)
class Results:
    """How the results of a call are made from those of the graph.

    `fixed` has the results that are no tensors. `given` are results that are arguments: the
    positions of both. `views` are views of parameters. All others are copied: `copied` has the
    position of a result and that of its tensor among `made`.
    """

    fixed: tuple[Any, ...]
    given: tuple[tuple[int, int], ...]
    views: tuple[tuple[int, Tensor], ...]
    copied: tuple[tuple[int, int], ...]
    made: tuple[Tensor, ...]


class Recorded:
    """One graph, and the calls that it fits."""

    def __init__(
        self, key: Hashable, tensors: Sequence[Tensor], held: Sequence[bool], memory: Memory
    ) -> None:
        self.key = key
        self._memory = memory
        self._held = [at for at, stays in enumerate(held) if stays]
        self._copied = [at for at, stays in enumerate(held) if not stays]
        self._addresses = [each.data_ptr() for each in tensors]
        self._held_at = [self._addresses[at] for at in self._held]
        self._owners = [TensorWeakRef(tensors[at]) for at in self._held]
        self._facts, self._device = facts_of(tensors), tensors[0].device
        self._alike = None
        if len({id(each) for each in tensors}) == len(tensors) and tensors:
            self._alike = guard._fw_likeness(tensors)
        self._expanded = any(0 in tensors[at].stride() for at in self._copied)

    def capture(
        self, tensors: Sequence[Tensor], run: Run, outputs: int | None, views: bool
    ) -> None:
        """Capture a call. The first results are the caller's: this many `outputs`, or all. If
        `views`, views of parameters are given away as they are."""

        def build() -> tuple[list[Tensor], list[Any]]:
            given = list(tensors)
            for at in self._copied:
                given[at] = _like(tensors[at])
            return given, list(run(list(given)))

        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.inference_mode(False), torch.no_grad():
                graph, (given, results) = self._memory.captured(build)
        finally:
            torch.set_autocast_cache_enabled(cached)
        self._graph: Launched = graph
        self._buffers = [_core(given[at]) for at in self._copied]
        stay = [given[at] for at in self._held]
        _refuse_shared(results[:outputs])
        self._results = _results_of(results, given, stay if views else [], self._device)
        self._made = [_core(each) for each in self._results.made]
        self._layouts = [
            (tuple(each.shape), each.stride(), each.dtype) for each in self._results.made
        ]
        self._spread = any(0 in each.stride() for each in self._results.made)

    def fits(self, key: Hashable, tensors: list[Tensor]) -> bool:
        if key != self.key:
            return False
        # Compares all at once, but knows no tensor that is given twice.
        alike = self._alike is not None and self._alike(*tensors)
        if not alike and (self._alike is not None or facts_of(tensors) != self._facts):
            return False
        if _same_addresses is not None:
            return bool(_same_addresses(tensors, self._addresses, self._held))
        return [tensors[at].data_ptr() for at in self._held] == self._held_at

    @property
    def is_stale(self) -> bool:
        """Whether a parameter is gone, or has moved: the next call cannot fit."""
        for at, owner in zip(self._held, self._owners, strict=True):
            tensor = owner()
            if tensor is None or tensor.data_ptr() != self._addresses[at]:
                return True
        return False

    def replay(self, tensors: list[Tensor]) -> list[Any]:
        sources = [tensors[at] for at in self._copied]
        if self._expanded:
            sources = [_core(each) for each in sources]
        recording = torch.is_grad_enabled()
        fresh = _fresh(self._layouts, self._device)
        self._memory.begin()
        try:
            torch._C._set_grad_enabled(False)
            _copy(self._buffers, sources)
            self._graph.replay()
            _copy([_core(each) for each in fresh] if self._spread else fresh, self._made)
        finally:
            torch._C._set_grad_enabled(recording)
            self._memory.end()
        found = self._results
        results = list(found.fixed)
        for at, source in found.copied:
            results[at] = fresh[source]
        for at, source in found.given:
            results[at] = tensors[source]
        for at, view in found.views:
            results[at] = view.detach()
        return results


class Replays:
    """The graphs of one function. `run` is its ordinary way."""

    def __init__(self, machine: Machine, held: Held, outputs: int | None, views: bool) -> None:
        self._machine, self._held = machine, held
        self._outputs, self._views = outputs, views
        self._graphs: tuple[Recorded, ...] = ()
        self._seen: set[Hashable] = set()
        self._lock = threading.RLock()
        self.captures = 0
        self.refused = ""  # why no call is captured any more
        self.unfit = ""  # why some call was not

    @property
    def graphs(self) -> int:
        return len(self._graphs)

    def renewed(self, machine: Machine) -> Replays:
        """The same without graphs, for a copy of the module."""
        return Replays(machine, self._held, self._outputs, self._views)

    def results(self, facts: Hashable, tensors: list[Any], run: Run) -> Sequence[Any]:
        """The results of `run` for these tensors. `facts` are all else that it depends on."""
        if self._machine.is_capturing():
            return run(tensors)  # it becomes a part of that graph
        key = (facts, self._machine.flags())
        for at, each in enumerate(self._graphs):
            if each.fits(key, tensors):
                if at:
                    self._put_first(each)
                return each.replay(tensors)
        if self.refused:
            return run(tensors)
        made = self._recorded(key, tensors, run)
        return run(tensors) if made is None else made.replay(tensors)

    def _put_first(self, graph: Recorded) -> None:
        with self._lock:
            if graph in self._graphs:
                self._graphs = (graph, *(each for each in self._graphs if each is not graph))

    def _recorded(self, key: Hashable, tensors: list[Tensor], run: Run) -> Recorded | None:
        """A graph for this kind of call, if it is the second one."""
        with self._lock:
            # Each thread warms up for itself: it has its own cuBLAS, which no capture can start.
            kind = (key, facts_of(tensors), threading.get_ident())
            if kind not in self._seen:
                self._seen.add(kind)
                if len(self._seen) > MOST_KINDS:
                    self._refuse(f"calls are of more than {MOST_KINDS} kinds")
                return None
            self._graphs = tuple(each for each in self._graphs if not each.is_stale)
            if len(self._graphs) >= MOST_GRAPHS or self.captures >= MOST_CAPTURES:
                often = f"{self.captures} calls were captured, {len(self._graphs)} graphs are kept"
                self._refuse(f"{often}: calls of other sizes, or with parameters at other places")
                return None
            device = tensors[0].device if tensors else None
            if device is None or not all(
                each.device == device and _is_copyable(each) for each in tensors
            ):
                self.unfit = "tensors on other devices, or that overlap themselves"
                return None
            made = Recorded(key, tensors, self._held(tensors), self._machine.memory(device))
            self.captures += 1
            try:
                made.capture(tensors, run, self._outputs, self._views)
            except RuntimeError as error:
                self._refuse(first_line(error))
                return None
            self._graphs = (made, *self._graphs)
            return made

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        debug.tell("further calls are launched kernel by kernel, without a CUDA graph: %s", reason)


def facts_of(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """What a graph depends on, beside the values and addresses of tensors."""
    return tuple(
        (type(each), each.shape, each.stride(), each.dtype, each.device, each.requires_grad)
        for each in tensors
    )


def _results_of(
    results: list[Any], given: list[Tensor], stay: list[Tensor], device: torch.device
) -> Results:
    arguments = {id(each): at for at, each in enumerate(given)}
    owners = {each.untyped_storage().data_ptr() for each in stay if each.numel()}
    fixed: list[Any] = []
    passed: list[tuple[int, int]] = []
    views: list[tuple[int, Tensor]] = []
    copied: list[tuple[int, int]] = []
    made: dict[int, Tensor] = {}
    for at, each in enumerate(results):
        fixed.append(None if isinstance(each, Tensor) else each)
        if not isinstance(each, Tensor):
            continue
        if id(each) in arguments:
            passed.append((at, arguments[id(each)]))
        elif each.untyped_storage().data_ptr() in owners:
            views.append((at, each))
        else:
            if not _is_copyable(each) or each.device != device:
                raise NotReplayedError(f"result {at} of the graph cannot be copied")
            made.setdefault(id(each), each)
            copied.append((at, list(made).index(id(each))))
    return Results(tuple(fixed), tuple(passed), tuple(views), tuple(copied), tuple(made.values()))


def _refuse_shared(outputs: Sequence[Any]) -> None:
    """Copies of two views of one memory would share none."""
    kept: dict[int, int] = {}
    for each in outputs:
        if isinstance(each, Tensor) and each.numel():
            first = kept.setdefault(each.untyped_storage().data_ptr(), id(each))
            if first != id(each):
                raise NotReplayedError("two results share memory")


def _is_copyable(tensor: Tensor) -> bool:
    """Whether no two elements share memory, but for expanded dimensions."""
    if tensor.layout is not torch.strided:
        return False
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in pairs if size > 1 and stride):
        if stride < reach:
            return False
        reach = stride * (size - 1) + reach
    return True


def _like(tensor: Tensor) -> Tensor:
    """New memory with the same layout."""
    return library._fw_memory(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _fresh(layouts: Sequence[Layout], device: torch.device) -> list[Tensor]:
    empty = library._fw_empty_cuda if device.type == "cuda" else None
    if empty is not None and device.index == library._fw_current_device():
        return [empty(*layout) for layout in layouts]  # 0.6 µs each
    return [library._fw_memory(*layout, device) for layout in layouts]


def _core(tensor: Tensor) -> Tensor:
    """Each element of an expanded tensor once."""
    if 0 not in tensor.stride():
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided(
        [size if stride else min(size, 1) for size, stride in pairs], tensor.stride()
    )


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)
