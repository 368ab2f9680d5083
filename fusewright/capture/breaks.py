"""What Dynamo says about the graphs that it hands over: why a graph ends, why it was made again."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import get_metrics_context, graph_break_reasons

from fusewright.capture.program import placeholders
from fusewright.capture.source_location import SourceLocation, innermost

_BRANCH = "a branch depends on the values of a tensor"
# Dynamo's names of reasons that begin with these words.
_KNOWN = {"generic_jump": _BRANCH, "Data-dependent branching": _BRANCH}

# Guards that name an object by its address.
_TYPE = re.compile(r"___check_type_id\((.*), \d+\), type=<class '(.*)'>")
_OBJECT = re.compile(r"___check_(?:obj|type)_id\((.*), \d+\)(?:, type=.*)?")


@dataclass(frozen=True)
class GraphBreak:
    """A line that Dynamo cannot capture: Python runs it, and a new graph begins after it."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def break_after(module: fx.GraphModule) -> GraphBreak | None:
    """Why a graph from Dynamo ends before its function does; None if it does not."""
    return _break(getattr(module, "compile_subgraph_reason", None))


def breaks_in(function: Callable[..., Any]) -> tuple[GraphBreak, ...]:
    """The graph breaks that Dynamo has noted in a function since its last reset."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ()
    last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
    lines = range(code.co_firstlineno, last + 1)
    own = (each for each in list(graph_break_reasons) if _passes(each, code.co_filename, lines))
    return tuple(dict.fromkeys(found for each in own if (found := _break(each))))


def _passes(reason: Any, file: str, lines: range) -> bool:
    """Whether a break is in these lines, or in what they call."""
    return any(each.filename == file and each.lineno in lines for each in reason.user_stack)


def _break(reason: Any) -> GraphBreak | None:
    if reason is None or not reason.graph_break:
        return None
    frames = [SourceLocation(each.filename, each.lineno or 1) for each in reason.user_stack]
    place = innermost(frames) or (frames[-1] if frames else SourceLocation("", 0))
    return GraphBreak(place.file, place.line, _in_words(reason.reason))


def _in_words(reason: str) -> str:
    """Dynamo's reason: its first line, and what it explains."""
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
    first = lines[0] if lines else "Dynamo gives no reason"
    known = next((words for start, words in _KNOWN.items() if first.startswith(start)), None)
    told = [each.partition(":")[2].strip() for each in lines if each.startswith("Explanation:")]
    return known or ": ".join([first, *told[:1]])


def recompile_reason() -> str:
    """Which guard of Dynamo failed, so that it compiles again. Empty the first time."""
    found = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")
    first = next(iter(str(found or "").splitlines()), "")
    if "BACKEND_MATCH" in first:  # see compile/places.py
        return "a method, a name or the environment that forward uses has changed"
    guard = re.sub(r"^\S+: ", "", first).split("  #")[0].strip()
    guard = _TYPE.sub(r"type(\1) is \2", guard)
    guard = _OBJECT.sub(r"\1 is the same object", guard)
    return f"a guard of Dynamo failed: {guard}" if guard else ""


def limit_reached(function: Callable[..., Any]) -> int | None:
    """How often Dynamo compiles a function at most, if it has done so. It then runs it eagerly."""
    if not hasattr(function, "__code__"):
        return None
    made = _debug_get_cache_entry_list(function.__code__)
    limit = int(torch._dynamo.config.recompile_limit)
    return limit if len(made) >= limit else None


def arguments_in(module: fx.GraphModule) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """The tensors that a graph from Dynamo takes, without parameters: "x: float32[s77, 8]".

    Then the sizes of their symbols in the call that is being compiled.
    """
    given = [node for node in placeholders(module) if not _is_held(node)]
    held = [(node, node.meta.get("example_value")) for node in given]
    tensors = [(node, each) for node, each in held if isinstance(each, torch.Tensor)]
    shapes: list[Any] = [each.shape for _, each in tensors]
    sizes = [size for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
    free = [size for size in sizes if size.node.expr.free_symbols]
    known = dict.fromkeys((str(size), int(size.node.hint)) for size in free)
    return tuple(_spelt(*each) for each in tensors), tuple(known)


def _is_held(node: fx.Node) -> bool:
    """Whether a module holds the tensor that an input of the graph stands for."""
    held = isinstance(node.meta.get("example_value"), nn.Parameter)
    return held or "_parameters_" in node.name or "_buffers_" in node.name


def _spelt(node: fx.Node, value: torch.Tensor) -> str:
    name = re.sub(r"^l_(.*)_$", r"\1", node.name.lower())
    shape = ", ".join(str(size) for size in value.shape)
    return f"{name}: {str(value.dtype).removeprefix('torch.')}[{shape}]"
