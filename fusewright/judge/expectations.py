"""The judge's side of every request: secret weights and inputs, eager's answers and float64's.

Nothing here runs a stranger's code. The model is the problem's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fusewright.errors import ProblemError
from fusewright.judge.eager_outputs import detached_outputs, outputs_node, without_gradients
from fusewright.judge.findings import Asked
from fusewright.judge.floor import LeastBytes, least_bytes
from fusewright.judge.memory import OwnPeak
from fusewright.judge.operators import operators_of
from fusewright.judge.script import FOLLOWS, SPLITS, Step, altered, has_numbers
from fusewright.judge.state import global_state, weights_digest
from fusewright.judge.ties import Ties
from fusewright.judge.variety import LARGE_BYTES, Changes, FreshGradients, halves, shrunk
from fusewright.judge.wire import Node
from fusewright.problem.inputs import (
    copied,
    is_differentiable,
    is_floating,
    named_tensors,
    seed_all,
)
from fusewright.problem.load import Problem
from fusewright.problem.nested import map_leaves
from fusewright.verify.attributes import restore_attributes
from fusewright.verify.feeds import Feed, Inputs, form, make_inputs
from fusewright.verify.figures import same_values
from fusewright.verify.others import right_runs
from fusewright.verify.reference import Reference
from fusewright.verify.replay import replayed
from fusewright.verify.rows import Batch, possible_batches
from fusewright.verify.run import make_model, restore
from fusewright.verify.scenarios import Question, Results, Scenario

# Each changes the last digits in another way.
_RIGHT_RUNS = 3
# A request holds at most two calls, with at most twice as many rows.
_SOME_CALLS = 5
SPARE_BYTES = 1 << 27
_MOST_TIMES = 3  # more rows
_KEPT_INPUTS = 3


_WITH_MODES = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)


class Expectations:
    """The model with secret weights, and what it answers to each step.

    With `classes`, also what it would answer in lower precisions.
    """

    def __init__(
        self,
        problem: Problem,
        modes: tuple[str, ...],
        seed: int,
        device: torch.device,
        *,
        classes: bool = False,
    ) -> None:
        self.problem, self.device, self.classes = problem, device, classes
        self.chance = random.Random(seed)
        self.model = make_model(problem, device, seed)
        self.references = {mode: self._reference(mode) for mode in modes}
        self.differentiable = {m: each.differentiable for m, each in self.references.items()}
        self._ties = Ties()
        self._outputs: dict[object, Node] = {}
        self._drawn_before: list[Inputs] = []
        self._last: dict[str, Inputs] = {}
        self._changes = Changes(self.model, self.references, self.chance)
        self._gradients = {m: FreshGradients(each) for m, each in self.references.items()}
        self.own_changes = self._own_changes()
        named = self.model.named_modules()
        self._parts = [name for name, each in named if name and isinstance(each, _WITH_MODES)]
        scalars = (name for name, each in self.model.named_parameters() if each.numel() == 1)
        self.scalars = frozenset(scalars)
        self._halves = halves(self._takers(), SPLITS, self.chance)

    def _takers(self) -> list[str]:
        """The weights and inputs that take gradients."""
        feed = next(iter(self.references.values())).feed
        inputs = [n for n, each in named_tensors(feed.masters[0]) if is_differentiable(each)]
        weights = [name for name, each in self.model.named_parameters() if each.requires_grad]
        return weights + (inputs if all(self.differentiable.values()) else [])

    def _reference(self, mode: str) -> Reference:
        seed_all(self.chance.getrandbits(31))
        values = make_inputs(self.problem, self.device)
        kind = self.device.type
        wrong = [each.device for _, each in named_tensors(values) if each.device.type != kind]
        if wrong:
            raise ProblemError(f"the inputs are on {wrong[0]}; the judge runs on {kind} here")
        seed = self.chance.getrandbits(31)
        return Reference(self.model, Feed((values,), seed=seed), seed, mode)

    def _own_changes(self) -> frozenset[str]:
        """What the model itself changes for everyone; a candidate may do the same."""
        changed: set[str] = set()
        for mode, reference in self.references.items():
            self.model.train(mode == "train")
            before = global_state(self.model)
            with torch.no_grad():
                self.model(*copied(reference.feed.masters[0], gradients=False))
            after = global_state(self.model)
            changed |= {name for name, value in before.items() if after.get(name) != value}
            self._restore(reference)
        return frozenset(changed)

    def _restore(self, reference: Reference) -> None:
        restore(self.model, reference.buffers)
        restore_attributes(self.model, reference.attributes)

    def arena_bytes(self) -> tuple[int, int]:
        """Room for the inputs and for the results of a few calls at once."""
        sizes = []
        for each in self.references.values():
            inputs = sum(leaf.nbytes for _, leaf in named_tensors(each.feed.masters[0]))
            sizes.append(inputs + sum(leaf.nbytes for leaf in each.tangents.values()))
        weights = sum(each.nbytes for each in self.model.parameters())
        return _SOME_CALLS * max(sizes) + SPARE_BYTES, _SOME_CALLS * (
            max(sizes) + weights
        ) + SPARE_BYTES

    def asked(self, step: Step) -> list[Asked]:
        """The calls of a step with their answers; empty if the model does not allow the step."""
        found: list[Asked] = []
        if step.part:
            step = replace(step, part=self.chance.choice(self._parts))
        if step.frozen or step.split:
            step = replace(step, fixed=self._fixed(step))
        for _ in range(2 if step.twice else step.sets):
            one = self._asked_once(step)
            if one is None:
                return []
            if step.sets > 1 and self._leaves_state(one):
                return [one]
            if step.twice and self._leaves_state(one):
                other = replace(step, mode="eval")
                again = step.mode != "eval" and "eval" in self.references
                return self.asked(other) if again else []
            found.append(one)
        return found

    def _fixed(self, step: Step) -> tuple[str, ...]:
        """The names of what requires no gradient in a step."""
        if step.split:
            return self._halves[step.split - 1]
        return tuple(name for name, _ in self.model.named_parameters())

    def _leaves_state(self, asked: Asked) -> bool:
        """Whether a call changes what the next one reads."""
        question, eager = asked.expected.question, asked.expected.eager[asked.step.layout]
        changed = (
            not same_values(before, after)
            for name, before in question.buffers.items()
            if isinstance(after := eager.get(f"buffer {name}"), Tensor)
        )
        return bool(question.attributes) or any(changed)

    def _asked_once(self, step: Step) -> Asked | None:
        for values in self._drawn(step):
            try:
                return self._answered(step, values)
            except (ProblemError, RuntimeError):
                if not step.name:
                    raise
        return None

    def _answered(self, step: Step, values: Inputs) -> Asked | None:
        reference = self.references[step.mode]
        differentiable = self.differentiable[step.mode]
        scenario = Scenario(step.name, step.gradients, (step.layout,), mode=step.mode)
        reference.feed.require_gradients(differentiable)
        reference.question(scenario, values)  # draws gradients if the sizes are other ones
        self._renew(step.mode)
        reference.feed.require_gradients(differentiable and step.gradients and step.input_gradients)
        # Of a step without gradients, or with none that PyTorch can compute, one layout is asked.
        with self._partly(reference, step):
            expected = reference.expect(scenario, values, classes=self.classes)
            if expected is None or step.layout not in expected.eager:
                return None
            if step.alter is not None and self._ties.decide(reference, expected, step.layout):
                return None
            if reference.random and not expected.truth:
                expected = replayed(reference, expected)
            expected = without_gradients(expected, step.fixed)
            outputs = self._eager_outputs(step, expected.question)
        weights = self.weights()
        detached = detached_outputs(expected.eager[step.layout], reference.tangents)
        facts = (outputs, reference.random, weights, self.scalars, detached)
        return Asked(step, expected, *facts)

    @contextmanager
    def _partly(self, reference: Reference, step: Step) -> Iterator[None]:
        """The model as a step wants it: without gradients of weights, or of some outputs."""
        tangents = reference.tangents
        named = self.model.named_parameters()
        frozen = [each for name, each in named if name in step.fixed and each.requires_grad]
        part = self.model.get_submodule(step.part) if step.part else nn.Module()
        try:
            part.training = step.mode != "train"
            part.__dict__["train"] = lambda mode=True: part  # whoever sets the whole model's mode
            for each in frozen:
                each.requires_grad_(False)
            if step.partial:
                left_out = self.chance.choice(sorted(tangents))
                reference.tangents = {n: e for n, e in tangents.items() if n != left_out}
            yield
        finally:
            reference.tangents = tangents
            del part.__dict__["train"]
            for each in frozen:
                each.requires_grad_(True)

    def applies(self, step: Step) -> bool:
        """Whether the model has what a step is about, and the device allows it."""
        if step.partial and len(self.references[step.mode].tangents) < 2:
            return False
        if step.frozen and not self.differentiable[step.mode]:
            return False
        if (step.part and not self._parts) or (step.split and not self._fixed(step)):
            return False
        if step.numbers and not has_numbers(self.references[step.mode].feed.masters[0]):
            return False
        return (not step.odd or self.device.type == "cpu") and (
            not step.aside or self.device.type == "cuda"
        )

    def others(self, asked: Asked) -> list[Results]:
        """Further right runs: how far apart may right results be?"""
        reference, question = self.references[asked.step.mode], asked.expected.question
        return [
            run
            for number in range(_RIGHT_RUNS)
            for run in right_runs(
                reference, replace(question, seed=question.seed + number), asked.step.layout
            )
        ]

    def _drawn(self, step: Step) -> Iterator[Inputs]:
        """Inputs for a step; with other rows, there may be several ways to choose them."""
        seed_all(self.chance.getrandbits(31))
        values = self._values(step)
        if step.alter is not None and not any(is_floating(e) for _, e in named_tensors(values)):
            return

        for each in self._with_rows(values, step.rows) if step.rows else [values]:
            yield tuple(map_leaves(partial(altered, step), leaf) for leaf in each)

    def _values(self, step: Step) -> Inputs:
        """New inputs, or such as follow from the last ones of the mode."""
        before = self._last.get(step.mode)
        if step.follows and before is not None:
            change = FOLLOWS[step.follows]

            def follows(leaf: object) -> object:
                return change(leaf) if isinstance(leaf, Tensor) else leaf

            return tuple(map_leaves(follows, each) for each in before)
        self._last[step.mode] = self._fresh()
        return self._last[step.mode]

    def questions(self, step: Step) -> list[Question]:
        """A plain step's calls with new values; their answers are not computed here."""
        reference, wanted = self.references[step.mode], self.differentiable[step.mode]
        scenario = Scenario(step.name, step.gradients, (step.layout,), mode=step.mode)
        reference.feed.require_gradients(wanted and step.asks_input_gradients)
        drawn = []
        for _ in range(step.sets):
            self._renew(step.mode)
            drawn.append(reference.question(scenario, self._new_values(step)))
        return [each for each in drawn if each is not None]

    def _renew(self, mode: str) -> None:
        """Other incoming gradients and another seed for the next call."""
        self._gradients[mode].renew(self.chance)
        self.references[mode].seed = self.chance.getrandbits(31)

    def _new_values(self, step: Step) -> Inputs:
        """New inputs; large ones come from one that was drawn before, by another factor each."""
        size = sum(
            each.nbytes for _, each in named_tensors(self.references[step.mode].feed.masters[0])
        )
        seed_all(self.chance.getrandbits(31))
        if size < LARGE_BYTES:
            return self._fresh()
        if len(self._drawn_before) < _KEPT_INPUTS:
            self._drawn_before.append(make_inputs(self.problem, self.device))
        return shrunk(self.chance.choice(self._drawn_before))

    def call_bytes(self, mode: str) -> int:
        """The inputs, incoming gradients and results of one call."""
        reference = self.references[mode]
        inputs = sum(each.nbytes for _, each in named_tensors(reference.feed.masters[0]))
        outputs = sum(each.nbytes for each in reference.tangents.values())
        weights = sum(each.nbytes for each in self.model.parameters())
        return 2 * (inputs + outputs) + weights

    def operators(self, step: Step, asked: Sequence[Asked]) -> dict[str, int]:
        """The operators that the model itself runs in these calls."""
        reference = self.references[step.mode]
        inputs = [copied(each.expected.question.inputs, gradients=False) for each in asked]
        self.model.train(step.mode == "train")
        with torch.no_grad():
            found = operators_of(lambda: [self.model(*each) for each in inputs])
        self._restore(reference)
        return found

    def peak_bytes(self, step: Step, asked: Asked, own: OwnPeak) -> int | None:
        """The memory that the model itself takes for this call."""
        reference, question = self.references[step.mode], asked.expected.question
        self.model.train(step.mode == "train")
        reference.eager.accept(question, 0)
        found = own.of(lambda: reference.eager.call(step.gradients, 0), self.device)
        self._restore(reference)
        return found

    def least_bytes(self, mode: str) -> dict[str, LeastBytes]:
        """What each pass must move at least."""
        found = self.asked(Step(mode=mode, gradients=True))[0]
        names = frozenset(name for name, _ in self.model.named_parameters())
        eager, tangents = found.expected.eager[found.step.layout], found.expected.question.tangents
        return {
            "forward": least_bytes(eager, found.eager_outputs, {}, names),
            "train": least_bytes(eager, found.eager_outputs, tangents, names),
        }

    def _fresh(self) -> Inputs:
        return shrunk(make_inputs(self.problem, self.device))

    def _with_rows(self, values: Inputs, rows: str) -> Iterator[Inputs]:
        for batch in possible_batches(values):
            if rows != "more":
                some = self.chance.randint(max(batch.rows // 4, 1), batch.rows - 1)
                yield batch.part(values, slice(0, 1 if rows == "one" else some))
                continue
            yield self._with_more_rows(values, batch)

    def _with_more_rows(self, values: Inputs, batch: Batch) -> Inputs:
        """Up to four times the rows; large inputs up to twice, because memory is short."""
        sizes = [each.nbytes for _, each in named_tensors(values)]
        times = _MOST_TIMES if sum(sizes) < LARGE_BYTES else 1
        extra = self.chance.randint(1, times * batch.rows)
        for _ in range(-(-extra // batch.rows)):
            count = min(extra, batch.rows)
            extra -= count
            more = iter([each for n, each in named_tensors(self._fresh()) if n in batch.names])
            values = batch.map(
                lambda each, n=count, m=more: torch.cat([each, next(m)[:n]]),  # type: ignore[misc]
                values,
            )
        return values

    def _eager_outputs(self, step: Step, question: Question) -> Node:
        """The containers, strides and shared memory of eager's outputs; values are left out."""
        key = (step.mode, step.gradients, step.frozen, form(question.inputs))
        lone = step.strided or step.numbers
        if key in self._outputs and not lone:
            return self._outputs[key]
        reference = self.references[step.mode]
        wanted = step.gradients and self.differentiable[step.mode]
        inputs = copied(question.inputs, gradients=wanted)
        self.model.train(step.mode == "train")
        seed_all(question.seed)
        with nullcontext() if step.gradients else torch.no_grad():
            outputs = self.model(*inputs)
        node = outputs_node(outputs, self.model, inputs)
        self._restore(reference)
        return node if lone else self._outputs.setdefault(key, node)

    def new_weights(self) -> Mapping[str, Tensor]:
        """Change the weights, and the buffers with them; returns the gradients of the step."""
        self.train_once()
        return self._changes.new_weights()

    def train_once(self) -> None:
        """Change the buffers as training does it; the weights stay."""
        seed_all(self.chance.getrandbits(31))
        self._changes.train_once(self._fresh())

    def weights(self) -> str:
        """The digest of all parameters as they must be now."""
        return weights_digest(self.model)
