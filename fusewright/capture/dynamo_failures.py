"""What an error of Dynamo tells: whether a part of forward ran before it, whether another trace was
active."""

from __future__ import annotations

import inspect
import traceback
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import external_utils
from torch._dynamo.exc import TorchDynamoException as DynamoError

__all__ = ["DynamoError", "has_begun", "is_nested_trace", "is_under_way"]

Place = tuple[str, int, str]  # the file, the first line and the name of a function

_PYTORCH = str(Path(torch.__file__).parent)
_RESUMED = "torch_dynamo_resume_in_"  # begins Dynamo's names of what follows a graph break


def has_begun(error: DynamoError, forward: Any) -> bool:
    """Whether a part of forward ran before Dynamo failed: then its effects are there already."""
    if _is_part_of(forward, _codes(error)):
        return True
    # Dynamo cuts all frames off some errors, but keeps what it traced, the outermost first. If that
    # is not forward, with the decorators around it, then it is what forward called.
    traced = [each for each in getattr(error, "real_stack", None) or () if not _is_dynamos(each)]
    first = {(file, name) for file, _, name in _first_to_run(forward)}
    return bool(traced) and (traced[0].filename, traced[0].name) not in first


def is_under_way(forward: Any) -> bool:
    """Whether this is asked while forward runs, or what follows a graph break in it."""
    return _is_part_of(forward, (each.f_code for each, _ in traceback.walk_stack(None)))


def _is_part_of(forward: Any, running: Iterable[types.CodeType]) -> bool:
    # Dynamo runs other code than forward's own, in the same place.
    own = _place(inspect.unwrap(forward).__code__)
    return any(_place(each) == own or each.co_name.startswith(_RESUMED) for each in running)


def _is_dynamos(frame: traceback.FrameSummary) -> bool:
    """Whether it is the function that Dynamo puts around a forward of PyTorch's own layers."""
    return frame.filename == external_utils.__file__


def _first_to_run(forward: Any) -> Iterator[Place]:
    """The outermost decorator of forward, or forward itself. Before it, only PyTorch's decorators,
    such as `torch.no_grad()`, may have run."""
    while isinstance(forward, types.FunctionType):
        yield _place(forward.__code__)
        if not forward.__code__.co_filename.startswith(_PYTORCH):
            break
        forward = getattr(forward, "__wrapped__", None)


def _codes(error: DynamoError) -> Iterator[types.CodeType]:
    """The code that was running when Dynamo failed."""
    steps = [step for step, _ in traceback.walk_tb(error.__traceback__)]
    yield from (each.f_code for each in steps)
    # From the errors of a back-end, Dynamo cuts off the frames before this one.
    frame: types.FrameType | None = getattr(error, "first_useful_frame", None)
    while frame is not None and frame is not steps[0]:
        yield frame.f_code
        frame = frame.f_back


def _place(code: types.CodeType) -> Place:
    return code.co_filename, code.co_firstlineno, code.co_name


def is_nested_trace(error: RuntimeError) -> bool:
    """Whether Dynamo refused to run a compiled function because a trace is active, which may be
    that of another thread. Nothing has run then."""
    return "symbolically trace a dynamo-optimized function" in str(error)
