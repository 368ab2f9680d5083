"""What forward reads that our guards do not compare, found by Dynamo's trace of the same call.

One trace of ours stands for all calls that our guards accept. They compare tensors, plain
arguments, and each module's class, flags, hooks and constants. Dynamo lists everything that a
forward reads. If something else is among it, a later call may need another trace, and only
Dynamo's own guards can tell.
"""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo.utils import dynamo_timed, get_metrics_context

from fusewright import debug
from fusewright.capture.trace import ONE_AT_A_TIME
from fusewright.runtime import altered

_PYTORCH = str(Path(torch.__file__).parent)
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Tensor)
# Settings of the process that no guard of ours compares.
_ASKED = frozenset(
    "is_grad_enabled is_inference_mode_enabled are_deterministic_algorithms_enabled "
    "is_deterministic_algorithms_warn_only_enabled get_float32_matmul_precision".split()
)
# Guards on a value. The others are on the class of an object, or on which object a name stands for.
_ON_VALUES = frozenset(
    "CONSTANT_MATCH EQUALS_MATCH TENSOR_MATCH SEQUENCE_LENGTH DICT_KEYS_MATCH RANGE_ITERATOR_MATCH "
    "BOOL_MATCH NONE_MATCH".split()
)
_CODE = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_INHERITED = frozenset(nn.Module().__dict__)
_CHAIN = re.compile(r"L\['\w+'\]((?:\._modules\['[^']*'\])*)(?:\.(\w+))?(.*)", re.DOTALL)
_ROOT = re.compile(r"([LG])\['([^']+)'\](.*)", re.DOTALL)


def unguarded(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why one trace cannot stand for later calls. Empty if it can, None if Dynamo fails."""
    odd = {type(each).__name__ for each in pytree.tree_leaves((args, kwargs)) if _is_odd(each)}
    if odd:
        return f"forward takes a {min(odd)}"
    try:
        with ONE_AT_A_TIME, warnings.catch_warnings(), get_metrics_context():
            warnings.simplefilter("ignore")
            with torch._dynamo.config.patch(allow_rnn=True), dynamo_timed("fusewright"):
                frame = convert_frame._get_frame(model, tuple(args), dict(kwargs))
                found = convert_frame.fullgraph_capture(model, tuple(args), dict(kwargs))
    except Exception as error:  # of the model, or Dynamo does not know what it does
        debug.log(1, "Dynamo cannot trace %s: %s", type(model).__name__, error)
        return None
    captured = found.graph_capture_output
    asked = _ASKED & _names(captured.traced_code)
    if asked:
        return f"forward asks torch.{min(asked)}()"
    return next(_reasons(captured.output_graph.guards, model, frame), "")


def _is_odd(value: Any) -> bool:
    return type(value) not in _PLAIN and not isinstance(value, torch.Tensor)


def _names(code: Sequence[types.CodeType]) -> set[str]:
    """The names that the user's own functions use."""
    own = (each for each in code if not each.co_filename.startswith(_PYTORCH))
    return {name for each in own for name in each.co_names}


def _reasons(guards: Any, model: nn.Module, frame: Any) -> Iterator[str]:
    for guard in guards:
        name = guard.name if isinstance(guard.name, str) else guard.name()
        name = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", name)
        if name and not _is_compared(name, guard.create_fn_name(), model, frame):
            yield f"forward reads {_spelt(name)}"


def _spelt(name: str) -> str:
    """Dynamo's name for a value, as the user would write it."""
    name = re.sub(r"dict\(type\(([^()]*)\)\.__dict__\)\['(\w+)'\]", r"\1.\2", name)
    name = re.sub(r"\._modules\['(\w+)'\]", r".\1", name)
    return _ROOT.sub(r"\2\3", name)


def _is_compared(name: str, kind: str, model: nn.Module, frame: Any) -> bool:
    """Whether our guards compare this value, or nobody changes it."""
    if "type(" in name:
        owner = _owner(model, name[name.index("L[") :]) if "L[" in name else None
        return kind not in _ON_VALUES or type(owner).__module__.startswith("torch.")
    root = _ROOT.match(name)
    if root is None:
        return kind not in _ON_VALUES
    scope, first, rest = root.groups()
    if scope == "G":
        return first.startswith("__") or _is_code(frame.globals.get(first), kind, rest)
    if first in frame.code.co_freevars:
        return _is_code(frame.locals.get(first), kind, rest)
    if frame.locals.get(first) is not model:
        return True  # an argument
    return _is_compared_attribute(model, name)


def _is_code(value: Any, kind: str, rest: str) -> bool:
    """Whether a global or enclosed name stands for code, and what is read of it is no setting."""
    if not isinstance(value, _CODE):
        return False
    known = isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] in _LIBRARIES
    return known or kind not in _ON_VALUES or "defaults__" in rest


_LIBRARIES = frozenset("torch math numpy builtins typing functools operator itertools".split())


def _owner(model: nn.Module, name: str) -> Any:
    """The module at the beginning of a name."""
    found = _CHAIN.match(name)
    owner: Any = model
    for key in re.findall(r"_modules\['([^']*)'\]", found[1] if found else ""):
        owner = owner._modules.get(key)
    return owner


def _is_compared_attribute(model: nn.Module, name: str) -> bool:
    found = _CHAIN.match(name)
    assert found is not None
    owner, attribute, rest = _owner(model, name), found[2], found[3]
    if attribute is None or attribute in _INHERITED:
        return True
    if type(owner).__module__.startswith("torch.nn."):
        return True
    value = vars(owner).get(attribute, altered._FwGone)
    if isinstance(value, torch.Tensor):
        return not rest
    if type(value) in altered._FW_FUNCTIONS:
        return not rest or "defaults__" in rest
    return altered._fw_constant(value) is not altered._FwGone
