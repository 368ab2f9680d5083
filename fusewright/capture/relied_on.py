"""What Dynamo's trace of one graph relies on, and Dynamo does not guard: found while it compiles.

Another branch of the same forward, or a submodule that was put in since, runs other code than the
example did. So each compilation says which methods of classes and which names its own code uses.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import remove_from_cache
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext

from fusewright.capture.beside import Zeros
from fusewright.capture.reachable import Reachable
from fusewright.capture.reads import Reads, Watched
from fusewright.capture.unguarded import CONSTANT, methods_of_objects, name_of

__all__ = ["note_zeros", "relied_on", "remove_from_cache", "traced_code"]


def traced_code() -> frozenset[types.CodeType]:
    """The code that Dynamo has traced for the graph that it hands over now."""
    context = TracingContext.try_get()
    return frozenset(() if context is None else context.traced_code)


def relied_on(model: nn.Module, codes: frozenset[types.CodeType]) -> tuple[Watched, ...]:
    """The places where these codes, called by `model`, find something that Dynamo does not guard.

    To be called by a back-end while Dynamo compiles.
    """
    reads, guards = _reads(model)
    methods_of_objects(guards, reads)
    return (*reads.watched.values(), *Reachable(model).watched(codes))


def note_zeros(model: nn.Module, zeros: Zeros) -> None:
    """Add those that Dynamo has compared for the graph that it hands over now."""
    reads, guards = _reads(model)
    own = next((name for name, each in reads.frame.locals.items() if each is model), "")
    for each in guards:
        if each.create_fn_name() in CONSTANT:
            zeros.add(own, name_of(each), reads.value(name_of(each)))


def _reads(model: nn.Module) -> tuple[Reads, Iterable[Any]]:
    """What follows the names of the frame that Dynamo compiles, and its guards."""
    frame, context = InstructionTranslator.current_tx(), TracingContext.try_get()
    given = SimpleNamespace(
        locals=frame.f_locals,
        globals=frame.f_globals,
        builtins=frame.f_builtins,
        code=frame.f_code,
        closure=None,
        argdefs=None,
        kwdefaults=None,
    )
    guards = () if context is None else context.guards_context.dynamo_guards
    return Reads(model, given), guards
