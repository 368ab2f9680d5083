"""Candidates as things that can be called: eager, torch.compile's modes, CUDA graphs, ModelNews.

Every candidate is a `Subject`: a module with its own copy of the same parameters, and one way to
run a pass on an input set. A pass gives named results: outputs, and gradients after a training
step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.bench.feeds import Feed
from fusewright.errors import VerifyError
from fusewright.problem.load import Problem, candidate_factory
from fusewright.problem.nested import leaves

Results = dict[str, object]
_COMPILE_MODES = {"compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}
_GRAPH_WARM_UPS = 3


@dataclass(frozen=True)
class Candidate:
    """Who takes part: a baseline by name, or a file with a ModelNew; ours is the emitted file."""

    name: str
    kind: str
    path: Path | None = None


class Subject:
    """A module that is run as it is, or through torch.compile."""

    def __init__(self, candidate: Candidate, model: nn.Module, feed: Feed) -> None:
        self.candidate = candidate
        self.model = model
        self.feed = feed
        self.tangents: Mapping[str, Tensor] = {}
        self._targets: dict[int, dict[str, Tensor]] = {}
        self._run: Callable[..., Any] = model
        self.compile()

    def compile(self) -> None:
        """Start anew with nothing compiled; the first call of each pass then builds."""
        mode = _COMPILE_MODES.get(self.candidate.kind)
        self._run = torch.compile(self.model, mode=mode) if mode else self.model

    def prepare(self, pass_name: str) -> None:
        """What has to happen once before a pass can be called often."""
        self.call(pass_name, 0)

    def call(self, pass_name: str, slot: int) -> Results:
        """Run a pass on an input set: outputs, and the gradients of a training step."""
        return self._forward(slot) if pass_name == "forward" else self._train(slot)

    def _forward(self, slot: int) -> Results:
        with torch.no_grad():
            return dict(leaves("output", self._run(*self.feed.slots[slot])))

    def _train(self, slot: int) -> Results:
        results = dict(leaves("output", self._run(*self.feed.slots[slot])))
        roots = [(_tensor(results, name), tangent) for name, tangent in self.tangents.items()]
        targets = self._targets_of(slot)
        if roots and targets:
            found = torch.autograd.grad(
                [root for root, _ in roots],
                list(targets.values()),
                [tangent for _, tangent in roots],
                allow_unused=True,
            )
            results.update(
                (f"grad {name}", each) for name, each in zip(targets, found, strict=True)
            )
        return results

    def _targets_of(self, slot: int) -> dict[str, Tensor]:
        """What wants a gradient; looked up once, as the walk through a model would be timed."""
        if slot not in self._targets:
            mine = self.feed.targets(slot)
            parameters = self.model.named_parameters()
            mine.update((name, each) for name, each in parameters if each.requires_grad)
            self._targets[slot] = mine
        return self._targets[slot]


def _tensor(results: Results, name: str) -> Tensor:
    found = results.get(name)
    if not isinstance(found, Tensor):
        raise VerifyError(f"{name} is no tensor, and the model's is one")
    return found


class GraphSubject(Subject):
    """Eager calls recorded in one CUDA graph per pass and input set, so that no input is copied."""

    def __init__(self, candidate: Candidate, model: nn.Module, feed: Feed) -> None:
        self._recorded: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Results]] = {}
        super().__init__(candidate, model, feed)

    def compile(self) -> None:
        self._recorded.clear()

    def prepare(self, pass_name: str) -> None:
        for slot in range(len(self.feed)):
            self._recorded[pass_name, slot] = self._record(pass_name, slot)

    def call(self, pass_name: str, slot: int) -> Results:
        graph, results = self._recorded[pass_name, slot]
        graph.replay()
        return results

    def _record(self, pass_name: str, slot: int) -> tuple[torch.cuda.CUDAGraph, Results]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_GRAPH_WARM_UPS):
                super().call(pass_name, slot)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = super().call(pass_name, slot)
        detached = {
            name: each.detach() if isinstance(each, Tensor) else each
            for name, each in results.items()
        }
        return graph, detached


def make_subject(candidate: Candidate, problem: Problem, model: nn.Module, feed: Feed) -> Subject:
    """The candidate with a copy of `model`'s parameters, in its mode and on its device."""
    if candidate.path is None:
        mine = copy.deepcopy(model)
        kind = GraphSubject if candidate.kind == "cudagraphs" else Subject
        return kind(candidate, mine, feed)
    return Subject(candidate, load_model(candidate.path, problem, model), feed)


def load_model(path: Path, problem: Problem, model: nn.Module) -> nn.Module:
    """A ModelNew from its file, with `model`'s parameters, mode and device."""
    mine = candidate_factory(path, problem)()
    require_same_state(path, model, mine)
    held = [*model.parameters(), *model.buffers()]
    mine = mine.to(held[0].device) if held else mine
    mine.load_state_dict(model.state_dict())
    return mine.train(model.training)


def require_same_state(path: Path, model: nn.Module, mine: nn.Module) -> None:
    """Raise VerifyError where a ModelNew has other parameters or buffers than the model."""
    theirs, ours = _shapes(model), _shapes(mine)
    for name in {**theirs, **ours}:
        if theirs.get(name) != ours.get(name):
            raise VerifyError(
                f"{path}: {name} is {ours.get(name, 'not there')} in ModelNew and "
                f"{theirs.get(name, 'not there')} in Model; both must have the same parameters"
            )


def _shapes(model: nn.Module) -> dict[str, str]:
    state: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}"
        for name, each in state.items()
    }
