"""Modules whose kernels are compiled together: the compilers' start is most of their time.

While modules are optimized, kernels are collected instead of compiled. Equal ones of several
modules are one kernel. `build` compiles them as one source, and the modules find theirs in it.
Without a GPU, CUDA kernels can be `emulated`: tensors are on the CPU then, and g++ builds what nvcc
would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from fusewright.build import build, load
from fusewright.capture.unguarded import Trust
from fusewright.codegen.source import Source
from fusewright.compile import pipeline, solution
from fusewright.compile.loading import kernels_of
from fusewright.errors import CompileFailed
from fusewright.ir.kernel import Kernel
from fusewright.kinds import registry
from fusewright.runtime import library
from fusewright.target.device import architecture
from fusewright.target.target import Target
from tests.support import cuda_on_host, loop_runs

# A library and what compiles it with the kernels that few calls need, or why there is none.
Opened = tuple[Any, Callable[[], Any]] | CompileFailed


class Together:
    """The kernels of many modules, for one device."""

    def __init__(self, device: torch.device, emulated: bool = False) -> None:
        self.device, self.emulated = device, emulated
        # A model without any tensor is the host's, whatever the others are made for.
        self._kernels: dict[Target, dict[Any, tuple[Kernel, Any]]] = {}
        self._names: dict[int, tuple[Target, dict[str, str]]] = {}  # of a source's kernels
        self._waiting: list[tuple[Target, _Later]] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Modules that are optimized here wait for their kernels. What forward reads besides its
        arguments is not asked: no guard of ours stands for another call here. They are not compared
        with eager either: that is the sweep's task, and they cannot run yet."""
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(pipeline, "render", self._render))
            patches.enter_context(mock.patch.object(solution, "kernels_of", self._kernels_of))
            patches.enter_context(mock.patch.object(solution, "trust_of", lambda *_: Trust()))
            patches.enter_context(mock.patch.object(solution, "found_different", lambda *_: ""))
            if self.emulated:
                patches.enter_context(mock.patch.object(pipeline, "target_of", lambda _: EMULATED))
                patches.enter_context(mock.patch.object(pipeline, "Prepared", _for_the_host))
            yield

    def _render(self, kernels: Sequence[tuple[Kernel, Any]], target: Target) -> Source:
        made = [registry._rendered(*each, target) for each in kernels]
        if any(entry.terms for entry, _ in made):
            return registry.render(kernels, target)  # their precision is chosen at a call
        known, names = self._kernels.setdefault(target, {}), {}
        for kernel, choice in kernels:
            key = (kernel.canonical(), choice)
            if key not in known:
                own = dataclasses.replace(kernel, name=f"{kernel.name}_no{len(known)}")
                known[key] = (own, choice)
            names[kernel.name] = known[key][0].name
        source = Source(target.language, "", tuple(entry for entry, _ in made))
        self._names[id(source.entries)] = target, names
        return source

    def _kernels_of(self, source: Source, load_text: Callable[[str], Any]) -> Any:
        if source.text:
            return _KERNELS_OF(source, load_text)
        entries = {each.name: each.macro for each in source.entries}
        target, names = self._names[id(source.entries)]
        made = _Later(entries, names)
        self._waiting.append((target, made))
        return made

    def build(self) -> int:
        """Compile what was collected. The number of kernels."""
        for target, known in self._kernels.items():
            entries = self._built(target, list(known.values()))
            for made_for, each in self._waiting:
                if made_for == target:
                    each.bind(entries)
        return sum(map(len, self._kernels.values()))

    def _built(self, target: Target, kernels: list[tuple[Kernel, Any]]) -> dict[str, Opened]:
        """The libraries of kernels, by name. Where the compiler fails, each half is tried alone."""
        if not kernels:
            return {}
        kernels.sort(key=lambda each: registry.place_of(each[0]))
        source = registry.render(kernels, target, shown=())
        # Without the kernels that few calls need; the first such call compiles all of them.
        few = dataclasses.replace(source, text="#define FW_RARE 0\n" + source.text)
        try:
            opened = self._opened(few)
        except CompileFailed as error:
            if len(kernels) == 1:
                return {kernels[0][0].name: error}
            half = len(kernels) // 2
            return self._built(target, kernels[:half]) | self._built(target, kernels[half:])
        whole = functools.cache(lambda: self._opened(source))
        return {each.name: (opened, whole) for each, _ in kernels}

    def _opened(self, source: Source) -> Any:
        if self.emulated and source.language == "cuda":
            return loop_runs.compile_source(cuda_on_host.emulated(source), loop_runs.EMULATED)
        return load(build(source, arch=architecture(self.device), cores=1))


_KERNELS_OF, _PREPARED = kernels_of, pipeline.Prepared
# Matmuls and convolutions stay PyTorch's: the tests of kernels emulate ours.
EMULATED = dataclasses.replace(Target.cuda(), tensor_cores=False)


def _for_the_host(target: Target, *rest: Any, **named: Any) -> pipeline.Prepared:
    """With the calls of a host kernel, since that is what is built."""
    return _PREPARED(Target.host(), *rest, **named)


class _Later(library._FwKernels):
    """Entry points of a library that is compiled later."""

    def __init__(self, entries: dict[str, str], names: dict[str, str]) -> None:
        super().__init__(entries, "", lambda text: None)
        self._names = names

    def build(self) -> None:
        """Not yet."""

    def bind(self, built: Mapping[str, Opened]) -> None:
        for name in self._entries:
            own = self._names[name]
            found = built[own]
            if isinstance(found, CompileFailed):
                self.__dict__[name] = functools.partial(_raise, found)
                continue
            rarely = library._fw_rarely(found[1], own)
            self.__dict__[name] = library._fw_builtin(found[0], own, rarely)


def _raise(error: CompileFailed, *given: Any) -> None:
    raise error
