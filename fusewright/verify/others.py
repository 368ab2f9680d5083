"""Further runs of a model that are right: how far apart may right results be?

Eager's error in one run may be small by luck. Another layout in memory makes PyTorch add in another
order or choose another algorithm. A change of the last digit of every number shows what the sums of
a model cancel: an error of that size is in the data already. The same change of every result within
the model shows what cancels between its operators, where eager may be exact by luck.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fusewright.problem.inputs import is_overlapping, laid_out
from fusewright.problem.nested import map_leaves
from fusewright.verify.feeds import Feed
from fusewright.verify.precision import strict_matmuls
from fusewright.verify.reference import Reference
from fusewright.verify.run import Subject, ask
from fusewright.verify.scenarios import Question, Results
from fusewright.verify.wide import WideModel, last_digit_changed

Run = Callable[[Reference, Question, str], Results]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def right_runs(reference: Reference, question: Question, layout: str) -> Sequence[Results]:
    """The results of further right runs, as far as the model takes part."""
    runs = (_in_another_layout, _with_other_last_digits, _with_rounded_results)
    return _made(reference, question, layout, runs)


def eager_runs(reference: Reference, question: Question, layout: str) -> Sequence[Results]:
    """Further runs of eager: in another layout, without TF32, and with other last digits."""
    runs = (_in_another_layout, _without_tf32, _eager_with_other_last_digits)
    return _made(reference, question, layout, runs)


def _made(
    reference: Reference, question: Question, layout: str, runs: Sequence[Run]
) -> Sequence[Results]:
    found: list[Results] = []
    for run in runs:
        try:
            found.append(run(reference, question, layout))
        except (RuntimeError, TypeError):
            continue  # the model wants its own layout, or memory is short: eager alone counts
    return found


def _in_another_layout(reference: Reference, question: Question, layout: str) -> Results:
    model = copy.deepcopy(reference.model)
    for each in (*model.parameters(), *model.buffers()):
        each.data = _relaid(each.data)
    inputs = tuple(map_leaves(_relaid_leaf, each) for each in question.inputs)
    feed = Feed((inputs,), seed=0, gradients=reference.feed.gradients)
    asked = replace(question, inputs=inputs, blocks=())
    return ask(Subject(model, feed), asked, (layout,)).results[layout]


def _without_tf32(reference: Reference, question: Question, layout: str) -> Results:
    with strict_matmuls():
        return ask(reference.eager, replace(question, blocks=()), (layout,)).results[layout]


def _with_other_last_digits(reference: Reference, question: Question, layout: str) -> Results:
    changed = last_digit_changed(question.seed)
    wide = WideModel(reference.model, reference.feed.gradients, change=changed)
    return wide.ask(question, (layout,))[layout]


def _with_rounded_results(reference: Reference, question: Question, layout: str) -> Results:
    wide = WideModel(reference.model, reference.feed.gradients, rounding=question.seed)
    return wide.ask(question, (layout,))[layout]


def _eager_with_other_last_digits(reference: Reference, question: Question, layout: str) -> Results:
    """Without a float64 run: a sum that cancels shows in eager, too."""
    changed = last_digit_changed(question.seed)

    def rounded(leaf: object) -> object:
        new = changed(leaf)
        return new.to(leaf.dtype) if isinstance(leaf, Tensor) and isinstance(new, Tensor) else new

    inputs = tuple(map_leaves(rounded, each) for each in question.inputs)
    feed = Feed((inputs,), seed=0, gradients=reference.feed.gradients)
    asked = replace(question, inputs=inputs, blocks=())
    return ask(Subject(reference.model, feed), asked, (layout,)).results[layout]


def _relaid_leaf(leaf: object) -> object:
    return _relaid(leaf) if isinstance(leaf, Tensor) else leaf


def _relaid(tensor: Tensor) -> Tensor:
    """The same values in another order in memory: channels-last for images, else reversed axes."""
    if tensor.dim() < 2 or is_overlapping(tensor):
        return tensor
    if tensor.dim() in _CHANNELS_LAST:
        return tensor.contiguous(memory_format=_CHANNELS_LAST[tensor.dim()])
    return laid_out(tensor.detach(), "transposed")
