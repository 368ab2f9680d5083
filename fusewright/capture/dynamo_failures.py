"""What an error of Dynamo tells: whether a part of forward ran before it, whether another trace was
active."""

from __future__ import annotations

import inspect
import traceback
import types
from collections.abc import Iterator
from typing import Any

from torch._dynamo.exc import TorchDynamoException as DynamoError

__all__ = ["DynamoError", "has_begun", "is_nested_trace"]

_RESUMED = "torch_dynamo_resume_in_"  # begins Dynamo's names of what follows a graph break


def has_begun(error: DynamoError, forward: Any) -> bool:
    """Whether a part of forward ran before Dynamo failed: then its effects are there already."""
    own = _place(inspect.unwrap(forward).__code__)
    if any(_place(each) == own or each.co_name.startswith(_RESUMED) for each in _codes(error)):
        # Dynamo runs other code than forward's own, in the same place.
        return True
    # Dynamo cuts all frames off some errors, but keeps which function it traced: forward, a
    # decorator around it, or what forward calls.
    traced = next(iter(getattr(error, "real_stack", None) or ()), None)
    outer = {_place(each.__code__) for each in _decorators(forward)}
    names = {(file, name) for file, _, name in (own, *outer)}
    return traced is not None and (traced.filename, traced.name) not in names


def _decorators(forward: Any) -> Iterator[types.FunctionType]:
    """The functions around forward, the outermost first."""
    while isinstance(forward, types.FunctionType) and hasattr(forward, "__wrapped__"):
        yield forward
        forward = forward.__wrapped__


def _codes(error: DynamoError) -> Iterator[types.CodeType]:
    """The code that was running when Dynamo failed."""
    steps = [step for step, _ in traceback.walk_tb(error.__traceback__)]
    yield from (each.f_code for each in steps)
    # From the errors of a back-end, Dynamo cuts off the frames before this one.
    frame: types.FrameType | None = getattr(error, "first_useful_frame", None)
    while frame is not None and frame is not steps[0]:
        yield frame.f_code
        frame = frame.f_back


def _place(code: types.CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def is_nested_trace(error: RuntimeError) -> bool:
    """Whether Dynamo refused to run a compiled function because a trace is active, which may be
    that of another thread. Nothing has run then."""
    return "symbolically trace a dynamo-optimized function" in str(error)
