"""Requests between the calls of a hearing: copies of the model, and new weights for it."""

from __future__ import annotations

from pathlib import Path

from fusewright.judge.conversation import Conversation
from fusewright.judge.copies import COPIES, can_be_copied
from fusewright.judge.entry import Guilty, require, require_unharmed
from fusewright.judge.expectations import Expectations
from fusewright.judge.findings import fault_of_error, faults_of_memory, faults_of_state
from fusewright.judge.requests import copy_request, load_weights_request, step_request


def go_on_with_copy(
    talk: Conversation, how: str, path: Path, expectations: Expectations
) -> list[str]:
    """From now on a copy answers; returns a flag if the candidate cannot be copied.

    A copy that the model itself does not allow is not asked for.
    """
    if not can_be_copied(expectations.model, how):
        return []
    header, _ = talk.ask(COPIES[how], copy_request(how, expectations.model))
    require(faults_of_state(header, own=expectations.own_changes))
    if "error" not in header:
        require(faults_of_memory(header, expectations.weights()))
        return []
    fault = fault_of_error(header["error"], path.name, talk.doing)
    if how == "instance":
        raise Guilty(fault)
    return [f"cannot be {'pickled' if how == 'pickle' else 'copied'} ({fault.reason})"]


def take_new_weights(
    talk: Conversation, path: Path, expectations: Expectations, *, loaded: bool
) -> None:
    """Other weights, from an optimizer's step or from a file."""
    gradients = expectations.new_weights()
    if loaded:
        doing, request = "loaded weights", load_weights_request(expectations.model)
    else:
        doing, request = "an optimizer step", step_request(gradients)
    header, _ = talk.ask(doing, request)
    require_unharmed(header, path, talk, expectations.model)
