"""What Dynamo's trace of one graph relies on, and Dynamo does not guard: found while it compiles.

Another branch of the same forward, or a submodule that was put in since, runs other code than the
example did. So each compilation says which methods of classes and which names its own code uses.
"""

from __future__ import annotations

import types
from types import SimpleNamespace

from torch import nn
from torch._dynamo.eval_frame import remove_from_cache
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext

from fusewright.capture.reachable import Reachable
from fusewright.capture.reads import Reads, Watched
from fusewright.capture.unguarded import methods_of_objects

__all__ = ["relied_on", "remove_from_cache", "traced_code"]


def traced_code() -> frozenset[types.CodeType]:
    """The code that Dynamo has traced for the graph that it hands over now."""
    context = TracingContext.try_get()
    return frozenset(() if context is None else context.traced_code)


def relied_on(model: nn.Module, codes: frozenset[types.CodeType]) -> tuple[Watched, ...]:
    """The places where these codes, called by `model`, find something that Dynamo does not guard.

    To be called by a back-end while Dynamo compiles.
    """
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
    reads = Reads(model, given)
    if context is not None:
        methods_of_objects(context.guards_context.dynamo_guards, reads)
    return (*reads.watched.values(), *Reachable(model).watched(codes))
