"""Values as Python text: the result of a model, or of an attribute, rebuilt from its tensors."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fusewright.capture.convert import inexpressible
from fusewright.errors import CaptureError

# The module of the named tuples that max, sort and others return.
_NAMED_RESULTS = "torch.return_types"


class UnwritableError(CaptureError):
    """A value has no text; `what` is its class."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the model returns a {what}; return tensors, numbers, tuples, lists or dicts of them"
        )
        self.what = what


def tree_text(
    value: Any, flat: list[Any], types: dict[str, type], known: Mapping[int, str] | None = None
) -> str:
    """Python text that rebuilds `value` from the list `o`, whose items are appended to `flat`.

    The classes that the text names are added to `types`. Tensors whose ids are `known` have a text
    already.
    """
    inner = functools.partial(tree_text, flat=flat, types=types, known=known)
    if isinstance(value, torch.Tensor | torch.SymInt):
        if known and id(value) in known:
            return known[id(value)]
        flat.append(value)
        return f"o[{len(flat) - 1}]"
    if isinstance(value, torch.SymFloat | torch.SymBool):
        raise inexpressible(value.node.expr)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return f"{_type_name(type(value), types)}._make({row(map(inner, value))})"
    kind = type(value)
    if kind is list:
        return "[" + ", ".join(map(inner, value)) + "]"
    if kind is tuple:
        return row(map(inner, value))
    if kind is torch.Size or kind.__module__ == _NAMED_RESULTS:
        name = "torch.Size" if kind is torch.Size else f"{_NAMED_RESULTS}.{kind.__name__}"
        return f"{name}({row(map(inner, value))})"
    if kind is dict:
        return "{" + ", ".join(f"{_plain(k)}: {inner(v)}" for k, v in value.items()) + "}"
    if kind is OrderedDict:
        items = ", ".join(f"({_plain(k)}, {inner(v)})" for k, v in value.items())
        return f"{_type_name(OrderedDict, types)}([{items}])"
    return _plain(value)


def input_text(position: int) -> str:
    """Stands for a tensor input, until the order of all inputs is known."""
    return f"_fw_input_{position}_"


def held_text(position: int) -> str:
    """Stands for the parameter or buffer at this position among the names of all."""
    return f"_fw_held_{position}_"


def size_text(position: int) -> str:
    """Stands for the symbolic size at this position among those of a result."""
    return f"_fw_size_{position}_"


def completed(text: str, meant: Mapping[str, str]) -> str:
    """The text with what is meant in place of all that stands for inputs and sizes."""
    return re.sub(r"_fw_(?:input|held|size)_\d+_", lambda at: meant[at[0]], text)


def _plain(value: Any) -> str:
    """The text of a constant."""
    if type(value) is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    if type(value) is tuple:
        return row(map(_plain, value))
    if type(value) is torch.dtype:
        return str(value)
    if value == torch.device("cpu"):
        return 'torch.device("cpu")'
    raise UnwritableError(type(value).__name__)


def row(texts: Iterable[str]) -> str:
    return "(" + "".join(text + ", " for text in texts).rstrip(" ") + ")"


def _type_name(kind: type, types: dict[str, type]) -> str:
    """A name for a class: unique among classes of its name, and allowed in any emitted file."""
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}".encode()).hexdigest()[:8]
    word = re.sub(r"\W", "_", kind.__name__, flags=re.ASCII).replace("pass", "pas_s")
    name = f"_FW_TYPE_{word}_{digest}"
    types[name] = kind
    return name
