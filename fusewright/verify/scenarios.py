"""The questions to a candidate, and its answers, as data.

`SCENARIOS` is the only table of checks. `verify` and `bench` both ask all of it. A `Question` holds
only values, so any process that has the model can answer it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from fusewright.problem.inputs import LAYOUTS, Block, with_nan

Results = Mapping[str, object]
# A call as users make it: gradients arrive contiguous.
PLAIN_LAYOUT = ("contiguous",)


@dataclass(frozen=True)
class Scenario:
    """One way to call a model. The scenario without a name is the call that is timed.

    `layouts` are the memory layouts of the incoming gradients. `alter` changes every leaf of the
    inputs, `new_parameters` changes the parameters in place first, `once` asks in one mode only.
    `again` makes the same call before: for models that change their own attributes.
    """

    name: str = ""
    gradients: bool = False
    layouts: tuple[str, ...] = PLAIN_LAYOUT
    alter: Callable[[object], object] | None = None
    new_parameters: bool = False
    once: bool = False
    again: bool = False
    mode: str = "train"

    @property
    def label(self) -> str:
        """The scenario in words: train; eval, no_grad; eval, no_grad, NaN."""
        return ", ".join(filter(None, (self.mode, "" if self.gradients else "no_grad", self.name)))


SCENARIOS = (
    Scenario(gradients=True, layouts=LAYOUTS),
    Scenario(),
    Scenario("NaN", alter=with_nan, once=True),
    # A result that was computed from the old values is wrong now.
    Scenario("new parameters", gradients=True, new_parameters=True, once=True),
    Scenario("new parameters", new_parameters=True, once=True),
    # A hidden state that was None, or on another device, is the result of the first call now.
    Scenario("second call", gradients=True, again=True, once=True),
    Scenario("second call", again=True, once=True),
)


def asked(modes: Sequence[str]) -> Iterator[Scenario]:
    """Every scenario in every mode; those with `once` only in the last mode."""
    for mode in modes:
        for each in SCENARIOS:
            if mode == modes[-1] or not each.once:
                yield replace(each, mode=mode)


@dataclass(frozen=True)
class Question:
    """All that a model needs for one run: inputs, buffers, random seed and incoming gradients.

    `blocks` are the sizes of the free memory to fill with NaN before the run. `attributes` are
    those that the model changes, with their values before the run.
    """

    scenario: Scenario
    seed: int
    inputs: tuple[object, ...]
    buffers: Mapping[str, Tensor]
    tangents: Mapping[str, Tensor]
    blocks: tuple[Block, ...] = ()
    attributes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """Copies of everything that came out, by gradient layout and then by name.

    Names are `output`, `grad NAME`, `buffer NAME` and, if the model wrote into it, `input NAME`.
    `random` says whether the model drew random numbers, `differentiable` which outputs require
    gradients.
    """

    results: Mapping[str, Results]
    random: bool = False
    differentiable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Usual:
    """What two right runs of a smaller call differ by: in all, and in one element."""

    error: float
    largest: float
    noise: bool = False


@dataclass(frozen=True)
class Expected:
    """The answers that a candidate is compared with, by gradient layout.

    `truth` is the float64 run; if it is empty, `why` gives the reason, and `usual` may have the
    errors of a smaller call. `strict` (eager without TF32) and `narrow` (matmuls of fewer digits)
    exist if a precision class is wanted. `others` are further right runs. The two `usual_` figures
    are the root mean squares of the largest result and the largest gradient.
    """

    question: Question
    eager: Mapping[str, Results]
    truth: Mapping[str, Results]
    usual_rms: float = 0.0
    usual_gradient_rms: float = 0.0
    strict: Mapping[str, Results] = field(default_factory=dict)
    narrow: Mapping[str, Mapping[str, Results]] = field(default_factory=dict)
    others: Mapping[str, Sequence[Results]] = field(default_factory=dict)
    usual: Mapping[str, Usual] = field(default_factory=dict)
    why: str = ""
