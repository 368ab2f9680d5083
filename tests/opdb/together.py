"""Modules whose kernels are compiled together: the compilers' start is most of their time.

While modules are optimized, kernels are collected instead of compiled. Equal ones of several
modules are one kernel. `build` compiles them as one source, and the modules find theirs in it.
Without a GPU, CUDA kernels can be `emulated`: tensors are on the CPU then, and g++ builds what nvcc
would.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from fusewright.build import build, load
from fusewright.capture.unguarded import Trust
from fusewright.codegen.source import Source
from fusewright.compile import module, pipeline, solution
from fusewright.ir.kernel import Kernel
from fusewright.kinds import registry
from fusewright.runtime import library
from fusewright.target.device import architecture
from fusewright.target.target import Target
from tests.support import cuda_on_host, loop_runs


class Together:
    """The kernels of many modules, for one device."""

    def __init__(self, device: torch.device, emulated: bool = False) -> None:
        self.device, self.emulated = device, emulated
        self._kernels: dict[Any, tuple[Kernel, Any]] = {}
        self._target: Target | None = None
        self._names: dict[int, dict[str, str]] = {}  # of a source's kernels
        self._waiting: list[_Later] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Modules that are optimized here wait for their kernels. What forward reads besides its
        arguments is not asked: no guard of ours stands for another call here. They are not compared
        with eager either: that is the sweep's task, and they cannot run yet."""
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(pipeline, "render", self._render))
            patches.enter_context(mock.patch.object(module, "kernels_of", self._kernels_of))
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
        self._target, names = target, {}
        for kernel, choice in kernels:
            key = (kernel.canonical(), choice)
            if key not in self._kernels:
                own = dataclasses.replace(kernel, name=f"{kernel.name}_no{len(self._kernels)}")
                self._kernels[key] = (own, choice)
            names[kernel.name] = self._kernels[key][0].name
        source = Source(target.language, "", tuple(entry for entry, _ in made))
        self._names[id(source.entries)] = names
        return source

    def _kernels_of(self, source: Source, load_text: Callable[[str], Any]) -> Any:
        if source.text:
            return _KERNELS_OF(source, load_text)
        entries = {each.name: each.macro for each in source.entries}
        made = _Later(entries, self._names[id(source.entries)])
        self._waiting.append(made)
        return made

    def build(self) -> int:
        """Compile what was collected. The number of kernels."""
        if self._target is None or not self._kernels:
            return 0
        kernels = sorted(self._kernels.values(), key=lambda each: registry.place_of(each[0]))
        source = registry.render(kernels, self._target, shown=())
        if self.emulated:
            opened: Any = loop_runs.compile_source(
                cuda_on_host.emulated(source), loop_runs.EMULATED
            )
        else:
            opened = load(build(source, arch=architecture(self.device), cores=1))
        for each in self._waiting:
            each.bind(opened)
        return len(kernels)


_KERNELS_OF, _PREPARED = module.kernels_of, pipeline.Prepared
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

    def bind(self, opened: Any) -> None:
        for name in self._entries:
            self.__dict__[name] = library._fw_builtin(opened, self._names[name])
