"""Results of a call that share memory: with an input, or with each other.

An autograd node returns new tensors only. So such a result is no output of the traced graph. It is
Python text that forms it, outside of the node, from the input or from an output: `tensors[0]`, or
`o[1].as_strided(…)`. It then shares memory as in eager mode, and PyTorch's own autograd sees the
view. What cannot be told for certain is left to the caller, who copies it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusewright.capture.tree import row, size_text

# Nodes of autograd whose gradient is that of a view. The rest of a name is a number.
_VIEWS = frozenset(
    f"{name}Backward"
    for name in (
        "Alias AsStrided Diagonal Expand Permute ReshapeAlias Select Slice Split SplitWithSizes "
        "Squeeze SqueezeMultiple T Transpose Unbind Unfold UnsafeView Unsqueeze View"
    ).split()
)


@dataclass(frozen=True)
class Aliases:
    """The first outputs of the graph, which others are views of, or which the result has twice. The
    text of each tensor that needs one, by its id, and the symbolic sizes in these texts. The texts
    of the inputs whose gradients pass through the result itself."""

    bases: tuple[torch.Tensor, ...]
    texts: Mapping[int, str]
    sizes: tuple[Any, ...]
    attached: tuple[str, ...]


def aliases(results: Sequence[torch.Tensor], inputs: Sequence[tuple[torch.Tensor, str]]) -> Aliases:
    """Texts for the results that share memory. `inputs` have a text each."""
    known: dict[int, str] = {}
    homes: dict[Any, list[tuple[torch.Tensor, str]]] = {}
    for tensor, text in inputs:
        known.setdefault(id(tensor), text)
        homes.setdefault(_memory(tensor), []).append((tensor, text))
    distinct = {id(each): each for each in results}
    groups: dict[Any, list[torch.Tensor]] = {}
    for name, each in distinct.items():
        if name not in known:
            groups.setdefault(_memory(each), []).append(each)
    bases: list[torch.Tensor] = []
    views: list[tuple[torch.Tensor, torch.Tensor, str]] = []
    for memory, group in groups.items():
        if memory in homes:
            views += _views_of(group, homes[memory])
        elif len(group) > 1 and (base := _base(group)) is not None:
            text = f"o[{len(bases)}]"
            bases.append(base)
            known[id(base)] = text
            views += _views_of(group, [(base, text)])
    symbols: list[Any] = []
    for view, base, text in views:
        known[id(view)] = _view_text(view, base, text, symbols)
    named = [id(each) for each in results]
    for name, each in distinct.items():
        if name not in known and named.count(name) > 1:
            known[name] = f"o[{len(bases)}]"
            bases.append(each)
    formed = [known[id(each)] for each in results if each.requires_grad and id(each) in known]
    attached = tuple(text for _, text in inputs if any(text in each for each in formed))
    return Aliases(tuple(bases), known, tuple(symbols), attached)


def _views_of(
    group: Sequence[torch.Tensor], bases: Sequence[tuple[torch.Tensor, str]]
) -> list[tuple[torch.Tensor, torch.Tensor, str]]:
    """The tensors of the group that are views of a base: each with the first such, and its text."""
    found = []
    for each in group:
        pairs = [(base, text) for base, text in bases if _is_view(each, base)]
        if pairs and each is not pairs[0][0]:
            found.append((each, *pairs[0]))
    return found


def _base(group: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A tensor that holds the whole memory of a group, and that most of it are views of."""
    candidates = [*group, *(each._base for each in group if each._base is not None)]
    held = {id(each): each for each in candidates if _holds_all(each)}
    views = {name: sum(_is_view(each, base) for each in group) for name, base in held.items()}
    best = max(views, key=lambda name: views[name], default=None)
    return None if best is None or views[best] < 2 else held[best]


def _holds_all(tensor: torch.Tensor) -> bool:
    """A new tensor of these sizes and strides has all elements that the memory has."""
    held = tensor.untyped_storage().nbytes()
    return (
        statically_known_true(tensor.storage_offset() == 0)
        and statically_known_true(held == tensor.numel() * tensor.element_size())
        and not _may_overlap(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether two elements may have the same memory, as in an expanded tensor."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    axes = [(size, stride) for size, stride in pairs if not statically_known_true(size == 1)]
    last: Any = 0  # the largest offset of an element so far
    for size, stride in sorted(axes, key=lambda axis: _example(axis[1])):
        if not statically_known_true(stride > last):
            return True
        last += (size - 1) * stride
    return False


def _example(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _is_view(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether `tensor` is a view of `base`, and its gradient, if it has one, is that of a view.

    If elements of the base share memory, `as_strided` divides a gradient among them.
    """
    plain = tensor.dtype == base.dtype and tensor.layout is base.layout is torch.strided
    if not plain or tensor.is_conj() != base.is_conj() or tensor.is_neg() != base.is_neg():
        return False
    if tensor is base or not tensor.requires_grad:
        return True
    if not base.requires_grad or _may_overlap(base):
        return False
    return _is_behind(torch.autograd.graph.get_gradient_edge(base), tensor)


def _is_behind(edge: Any, tensor: torch.Tensor) -> bool:
    """Whether nothing but views lies between the edge and the tensor."""
    found = torch.autograd.graph.get_gradient_edge(tensor)
    node, position = found.node, found.output_nr
    while (node, position) != (edge.node, edge.output_nr):
        if node.name().rstrip("0123456789") not in _VIEWS or len(node.next_functions) != 1:
            return False
        before, position = node.next_functions[0]
        if before is None:
            return False
        node = before
    return True


def _view_text(view: torch.Tensor, base: torch.Tensor, text: str, symbols: list[Any]) -> str:
    def number(size: Any) -> str:
        if isinstance(size, int):
            return str(size)
        symbols.append(size)
        return size_text(len(symbols) - 1)

    layout = f"{row(map(number, view.shape))}, {row(map(number, view.stride()))}"
    offset = view.storage_offset() - base.storage_offset()
    detached = ".detach()" if base.requires_grad and not view.requires_grad else ""
    if statically_known_true(offset == 0):
        return f"{text}.as_strided({layout}){detached}"
    return f"_fw_behind({text}, {number(offset)}, {layout}){detached}"


def _memory(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._cdata
