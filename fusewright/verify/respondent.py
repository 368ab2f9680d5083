"""Who answers the questions of `verify`: a module in this process, or a file in another one.

Text that was made by us a moment ago runs here, because that is fast. Anybody's file runs in a
process of its own; `judge.boxed` has that respondent.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from fusewright.verify.budget import Footprint
from fusewright.verify.feeds import Feed
from fusewright.verify.flags import steady_flags
from fusewright.verify.run import Subject, ask
from fusewright.verify.scenarios import Answer, Question


class Respondent(Protocol):
    """Answers questions with the model's parameters.

    `begin` comes before the questions of a mode; `footprint` is that of the largest call. `ask`
    takes inputs that require gradients if those of the feed do. `take_parameters` writes the
    model's values into the candidate's parameters, in place.
    """

    def begin(self, model: nn.Module, footprint: Footprint) -> None: ...
    def ask(self, question: Question, layout: str, feed: Feed) -> Answer: ...
    def take_parameters(self, model: nn.Module) -> None: ...


class Here:
    """A module in this process, which has the model's values already."""

    def __init__(self, candidate: nn.Module) -> None:
        self.candidate = candidate

    def begin(self, model: nn.Module, footprint: Footprint) -> None: ...

    def ask(self, question: Question, layout: str, feed: Feed) -> Answer:
        with steady_flags("the candidate"):
            return ask(Subject(self.candidate, feed), question, (layout,))

    def take_parameters(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, each in self.candidate.named_parameters():
                each.data.copy_(named[name])
