"""Callable candidates: eager, torch.compile's modes, CUDA graphs, ModelNew files.

Every candidate is a subject of the verifier's core: a module with its own copy of the parameters,
and one way to run a pass on an input set.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fusewright.errors import VerifyError
from fusewright.problem.load import Problem, candidate_factory
from fusewright.verify.feeds import Feed
from fusewright.verify.run import Subject, with_state_of
from fusewright.verify.scenarios import Results

_COMPILE_MODES = {"compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}
_GRAPH_WARM_UPS = 3


@dataclass(frozen=True)
class Candidate:
    """A baseline by name, or a file with a ModelNew; ours is the emitted file."""

    name: str
    kind: str
    path: Path | None = None

    @property
    def trusted(self) -> bool:
        """Whether this is PyTorch itself, which is checked only in scenarios that are timed."""
        return self.path is None


class BenchSubject(Subject):
    """A module that is run as it is, or through torch.compile."""

    def __init__(self, candidate: Candidate, model: nn.Module, feed: Feed) -> None:
        super().__init__(model, feed)
        self.candidate = candidate
        self.compile()

    def compile(self) -> None:
        """Start without compiled code; the first call of each pass then builds it."""
        mode = _COMPILE_MODES.get(self.candidate.kind)
        self.run = torch.compile(self.model, mode=mode) if mode else self.model

    def prepare(self, gradients: bool) -> None:
        """Build what a pass needs, before it is called many times."""
        self.call(gradients, 0)

    def call(self, gradients: bool, slot: int) -> Results:
        """As in the core; raises VerifyError if an output lacks the model's gradient."""
        results = super().call(gradients, slot)
        for name, tangent in self.tangents.items() if gradients else ():
            found = results.get(name)
            if not isinstance(found, Tensor) or not found.requires_grad:
                raise VerifyError(f"{name} has no gradient, but the model's has one")
            if found.shape != tangent.shape:
                raise VerifyError(f"{name} has another shape than the model's")
        return results


class GraphSubject(BenchSubject):
    """Eager calls, recorded in one CUDA graph per pass and input set, so no input is copied."""

    def __init__(self, candidate: Candidate, model: nn.Module, feed: Feed) -> None:
        self._recorded: dict[tuple[bool, int], tuple[torch.cuda.CUDAGraph, Results]] = {}
        super().__init__(candidate, model, feed)

    def compile(self) -> None:
        self._recorded.clear()

    def prepare(self, gradients: bool) -> None:
        for slot in range(len(self.feed)):
            self._recorded[gradients, slot] = self._record(gradients, slot)

    def call(self, gradients: bool, slot: int) -> Results:
        graph, results = self._recorded[gradients, slot]
        graph.replay()
        return results

    def _record(self, gradients: bool, slot: int) -> tuple[torch.cuda.CUDAGraph, Results]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_GRAPH_WARM_UPS):
                super().call(gradients, slot)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = super().call(gradients, slot)
        detached = {
            name: each.detach() if isinstance(each, Tensor) else each
            for name, each in results.items()
        }
        return graph, detached


def make_subject(
    candidate: Candidate, problem: Problem, model: nn.Module, feed: Feed
) -> BenchSubject:
    """The candidate with a copy of `model`'s parameters, in its mode and on its device."""
    if candidate.path is None:
        mine = copy.deepcopy(model)
        kind = GraphSubject if candidate.kind == "cudagraphs" else BenchSubject
        return kind(candidate, mine, feed)
    return BenchSubject(candidate, load_model(candidate.path, problem, model), feed)


def load_model(path: Path, problem: Problem, model: nn.Module) -> nn.Module:
    """A ModelNew from its file, with `model`'s parameters, mode and device."""
    return with_state_of(model, candidate_factory(path, problem)(), str(path))
