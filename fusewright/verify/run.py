"""One model, one question, one answer, in this process.

A `Subject` is a model with its own input tensors. `ask` writes a question's values into those
tensors, fills free memory with NaN, runs the model and copies its results. So neither unwritten nor
cached results can pass for right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.errors import VerifyError
from fusewright.problem.inputs import laid_out, named_tensors, poisoned_memory, seed_all
from fusewright.problem.load import Problem
from fusewright.problem.nested import leaves
from fusewright.verify.attributes import (
    attribute_values,
    restore_attributes,
    share_attributes,
    tensor_attributes,
)
from fusewright.verify.feeds import Feed
from fusewright.verify.figures import same_values
from fusewright.verify.scenarios import PLAIN_LAYOUT, Answer, Question, Results

# Makes a call: directly, or while a clock runs.
Through = Callable[[Callable[[], Results]], Results]


class Subject:
    """A model and its inputs; `call` is what is timed, `run` is what it calls."""

    def __init__(self, model: nn.Module, feed: Feed) -> None:
        self.model = model
        self.feed = feed
        self.tangents: Mapping[str, Tensor] = {}
        self.run: Callable[..., Any] = model
        self._targets: dict[int, dict[str, Tensor]] = {}

    def call(self, gradients: bool, slot: int) -> Results:
        """The named outputs for an input set; with `gradients`, those of a training step too."""
        if gradients:
            return self.train_step(slot, PLAIN_LAYOUT)[PLAIN_LAYOUT[0]]
        with torch.no_grad():
            return self._outputs(slot)

    def train_step(self, slot: int, layouts: Sequence[str]) -> dict[str, Results]:
        """Outputs and gradients of one forward, with a backward for every layout."""
        outputs = self._outputs(slot)
        return {
            layout: {**outputs, **self._gradients(slot, outputs, layout, layout != layouts[-1])}
            for layout in layouts
        }

    def accept(self, question: Question, slot: int) -> None:
        """Use a question's inputs and tangents."""
        self.feed.put(slot, question.inputs)
        self.tangents = question.tangents
        self._targets.pop(slot, None)

    def _outputs(self, slot: int) -> Results:
        return dict(leaves("output", self.run(*self.feed.slots[slot])))

    def _gradients(self, slot: int, outputs: Results, layout: str, keep: bool) -> Results:
        """The gradient of every target, or None where the outputs do not depend on it."""
        targets = self._targets_of(slot)
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        for name, tangent in self.tangents.items():
            root = outputs.get(name)
            if isinstance(root, Tensor) and root.requires_grad and root.shape == tangent.shape:
                fits = root.dtype == tangent.dtype  # a needless `to` would show in the profile
                roots.append(root)
                seeds.append(laid_out(tangent if fits else tangent.to(root.dtype), layout))
        if not self.tangents or not targets:
            return {}
        found: Sequence[Tensor | None] = [None] * len(targets)
        if roots:
            found = torch.autograd.grad(
                roots, list(targets.values()), seeds, retain_graph=keep, allow_unused=True
            )
        return {f"grad {name}": each for name, each in zip(targets, found, strict=True)}

    def _targets_of(self, slot: int) -> dict[str, Tensor]:
        """The tensors that require a gradient; found once, because the search would be timed."""
        if slot not in self._targets:
            mine = self.feed.targets(slot)
            parameters = self.model.named_parameters()
            mine.update((name, each) for name, each in parameters if each.requires_grad)
            self._targets[slot] = mine
        return self._targets[slot]


def ask(
    subject: Subject,
    question: Question,
    layouts: Sequence[str],
    *,
    slot: int = 0,
    through: Through = lambda call: call(),
) -> Answer:
    """One run with the question's values; `through` makes the call if the layout is plain."""
    scenario = question.scenario
    subject.model.train(scenario.mode == "train")
    restore(subject.model, question.buffers)
    subject.accept(question, slot)
    with (
        poisoned_memory(question.blocks) if question.blocks else nullcontext(),
        _attributes_restored(subject.model, question.attributes),
    ):
        seed_all(question.seed)
        if scenario.again:
            subject.call(False, slot)
        before = _random_state()
        if tuple(layouts) == PLAIN_LAYOUT:
            plain = through(lambda: subject.call(scenario.gradients, slot))
            results = {PLAIN_LAYOUT[0]: plain}
        else:
            results = subject.train_step(slot, layouts)
        random = not all(map(torch.equal, before, _random_state()))
        outputs = next(iter(results.values())).items()
        taking = (name for name, each in outputs if isinstance(each, Tensor) and each.requires_grad)
        return Answer(_copies(subject, question, slot, results), random, tuple(taking))


@contextmanager
def _attributes_restored(model: nn.Module, attributes: Mapping[str, object]) -> Iterator[None]:
    """Before the call, and after it: a state with a graph could not be copied with its model."""
    restore_attributes(model, attributes)
    try:
        yield
    finally:
        restore_attributes(model, attributes)


def _copies(
    subject: Subject, question: Question, slot: int, results: Mapping[str, Results]
) -> dict[str, Results]:
    """Copies, because a model may return its own buffer or input; each tensor is copied once."""
    held = attribute_values(subject.model, question.attributes)
    held |= {f"buffer {name}": each for name, each in subject.model.named_buffers()}
    given = zip(
        named_tensors(question.inputs), named_tensors(subject.feed.slots[slot]), strict=True
    )
    held.update(
        (f"input {name}", mine) for (name, old), (_, mine) in given if not same_values(old, mine)
    )
    made: dict[int, object] = {}

    def copied(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return made.setdefault(id(leaf), leaf.detach().clone())
        # A Python float was computed in the model's precision and is compared in it.
        return torch.tensor(leaf, dtype=torch.float32) if isinstance(leaf, float) else leaf

    return {
        layout: {name: copied(leaf) for name, leaf in {**found, **held}.items()}
        for layout, found in results.items()
    }


def restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Write these values into a model's buffers."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _random_state() -> list[Tensor]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *devices]


def make_model(problem: Problem, device: torch.device, seed: int) -> nn.Module:
    """The problem's model, with values off its initial ones, which a candidate could contain."""
    seed_all(seed)
    model = problem.make_model().to(device)
    seed_all(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + 0.1 * (torch.rand_like(parameter) - 0.5))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.1)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return model


def with_state_of(model: nn.Module, candidate: nn.Module, whose: str) -> nn.Module:
    """The candidate with the model's values, device and mode; VerifyError if they do not fit."""
    for kind in ("named_parameters", "named_buffers"):
        theirs = {name: _describe(value) for name, value in getattr(model, kind)()}
        ours = {name: _describe(value) for name, value in getattr(candidate, kind)()}
        for name in {**theirs, **ours}:
            if theirs.get(name) != ours.get(name):
                raise VerifyError(
                    f"{name} is {ours.get(name, 'missing')} in {whose} and "
                    f"{theirs.get(name, 'missing')} in the model; both must have the same "
                    f"{kind.removeprefix('named_')}"
                )
    held = [*model.parameters(), *model.buffers()]
    candidate = candidate.to(held[0].device) if held else candidate
    candidate.load_state_dict(model.state_dict())
    share_attributes(tensor_attributes(model), candidate)
    return candidate.train(model.training)


def _describe(value: Tensor) -> str:
    gradient = " with gradient" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{gradient}"
