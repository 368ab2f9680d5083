"""What every candidate has to give on the timed inputs: the model itself, and its float64 run.

`Reference` holds the eager model, its float64 copy and the state that each checked run starts
from. Memory is filled with NaN before a candidate is checked, so nothing unwritten passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from fusewright.bench.feeds import Feed
from fusewright.bench.precision import DIGITS, Expected, Rounded, check_values, rounded
from fusewright.bench.record import ValueCheck
from fusewright.bench.subjects import Candidate, Results, Subject
from fusewright.errors import ProblemError, VerifyError
from fusewright.problem.inputs import copied, named_tensors, poisoned_memory
from fusewright.problem.nested import map_leaves
from fusewright.verify.float64 import doubled, widened

# How a call is made: as it is, or while a clock runs.
Through = Callable[[Callable[[], Results]], Results]
_STIR = 0.5


class Reference:
    """The model that all are compared with; `seed` decides tangents and random numbers."""

    def __init__(self, model: nn.Module, feed: Feed, seed: int) -> None:
        self.model = model
        self.feed = feed
        self.seed = seed
        self.eager = Subject(Candidate("reference", "eager"), model, feed)
        self.buffers = {name: each.detach().clone() for name, each in model.named_buffers()}
        self.random = False
        # What the model itself writes into: whoever takes its place has to, too.
        self.written: set[str] = set()
        self.eager.tangents = self.tangents = self._tangents()

    def _tangents(self) -> dict[str, Tensor]:
        """The gradients that come in from behind: around one, so that no sum cancels to nothing."""
        torch.manual_seed(self.seed)
        before = _random_state()
        try:
            outputs = self.eager.call("train", 0)
        except Exception as error:
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ProblemError(f"the model itself fails in a training step: {what}") from error
        self.random = not all(map(torch.equal, before, _random_state()))
        self.written = self.feed.written(0)
        self._restore(self.model)
        return {
            name: torch.randn_like(each, memory_format=torch.contiguous_format) + 1
            for name, each in outputs.items()
            if isinstance(each, Tensor) and each.requires_grad
        }

    def expect(self, pass_name: str, slot: int) -> Expected:
        """The results of this pass on the values that the set holds now."""
        eager = self.run(self.eager, pass_name, slot)
        with strict_products() as stricter:
            strict = self.run(self.eager, pass_name, slot) if stricter else eager
        if self.random:
            why = "random model: compared with eager under the same seed"
            return Expected(eager, strict, {}, {}, why)
        try:
            truth = self._wide(pass_name, slot, None)
            narrow = {kind: self._wide(pass_name, slot, digits) for kind, digits in DIGITS.items()}
        except (RuntimeError, TypeError) as error:
            words = (str(error) or type(error).__name__).splitlines()[0]
            return Expected(eager, strict, {}, {}, f"compared with eager: no float64 run ({words})")
        return Expected(eager, strict, truth, narrow)

    def check(
        self,
        when: str,
        subject: Subject,
        pass_name: str,
        slot: int,
        expected: Expected,
        through: Through = lambda call: call(),
    ) -> tuple[ValueCheck, ...]:
        """Run a candidate on poisoned memory and compare everything that it gives."""
        with poisoned_memory(expected.eager.values()):
            found = self.run(subject, pass_name, slot, through)
        if more := sorted(self.feed.written(slot) - self.written):
            raise VerifyError(f"writes into its argument {more[0]}, and the model does not")
        return check_values(when, found, expected)

    def run(
        self,
        subject: Subject,
        pass_name: str,
        slot: int,
        through: Through = lambda call: call(),
    ) -> Results:
        """One run from the reference's buffers and seed, as copies: memory may be reused."""
        self._restore(subject.model)
        subject.feed.again(slot)
        torch.manual_seed(self.seed)
        given = through(lambda: subject.call(pass_name, slot))
        found = {name: _as_tensor(each) for name, each in given.items()}
        inputs = named_tensors(subject.feed.slots[slot])
        found.update((f"input {name}", each) for name, each in inputs if name in self.written)
        if subject.model.training:
            found.update((f"buffer {name}", each) for name, each in subject.model.named_buffers())
        return {
            name: each.detach().clone() if isinstance(each, Tensor) else each
            for name, each in found.items()
        }

    def stir(self, subjects: list[Subject]) -> None:
        """New parameter values in place, for all alike: what was made from old ones is stale."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        for name, mine in self.model.named_parameters():
            if not mine.is_floating_point():
                continue
            # Half of it at least: farther off than any precision is.
            factor = 1.0 - _STIR * (1.0 + float(torch.rand((), generator=generator))) / 2
            for subject in subjects:
                dict(subject.model.named_parameters())[name].data.mul_(factor)
            mine.data.mul_(factor)

    def _wide(self, pass_name: str, slot: int, digits: int | None) -> Results:
        self.feed.again(slot)
        model = copy.deepcopy(self.model).double()
        inputs = tuple(map_leaves(widened, each) for each in self.feed.slots[slot])
        if digits == DIGITS["bf16"]:
            # Whoever computes in 16 bits converts what he is given, too.
            inputs = tuple(map_leaves(lambda leaf: rounded(leaf, digits), each) for each in inputs)
            for each in model.parameters():
                each.data = rounded(each.data, digits)
        wants = bool(self.feed.targets(slot))
        feed = Feed.of(copied(inputs, gradients=wants))
        subject = Subject(Candidate("float64", "eager"), model, feed)
        subject.tangents = {name: each.double() for name, each in self.tangents.items()}
        with doubled(), Rounded(digits) if digits else nullcontext():
            return self.run(subject, pass_name, 0)

    def _restore(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(self.buffers[name])


@contextmanager
def strict_products() -> Iterator[bool]:
    """No TF32 in products and convolutions; yields whether that differs from the flags as set."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (bool(matmul.allow_tf32), bool(cudnn.allow_tf32))
    changes = torch.cuda.is_available() and any(before)
    if changes:
        matmul.allow_tf32, cudnn.allow_tf32 = False, False
    try:
        yield changes
    finally:
        if changes:
            matmul.allow_tf32, cudnn.allow_tf32 = before


def input_forms(feed: Feed) -> tuple[str, ...]:
    """The inputs in words: x0 float32[8, 16]."""
    return tuple(
        f"{name} {str(each.dtype).removeprefix('torch.')}{list(each.shape)}"
        for name, each in named_tensors(feed.masters[0])
    )


def _as_tensor(leaf: object) -> object:
    # A Python float is a number that was computed in the model's precision, so it is compared so.
    return torch.tensor(leaf, dtype=torch.float32) if isinstance(leaf, float) else leaf


def _random_state() -> list[Tensor]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *devices]
