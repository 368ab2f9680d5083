"""Decompositions that run once for equal operands. Their nodes are then copied.

A network has the same few layers many times. PyTorch decomposes each of them operator by operator,
with a fake tensor and a proxy for each step. Here the nodes that a decomposition adds to the graph
are kept, and a later call whose operands have the same dtypes, sizes, strides and numbers gets a
copy of them, with fake results of its own. What is not surely the same runs as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)

Decomposition = Callable[..., Any]
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = (int, float, bool)
_PLAIN = (*_NUMBERS, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_KNOWN_META = frozenset(("val", "tensor_meta"))
_VERSIONS = ("_replacements_version_counter", "_version_counter")  # of sizes; before PyTorch 2.13


class _NotAlike(Exception):
    """Nothing can be said of equal operands, or their nodes cannot be copied."""


@dataclass(frozen=True)
class _Step:
    """A node of a decomposition."""

    node: fx.Node
    op: str
    target: Any
    args: Any
    kwargs: Any
    name: str
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class _Result:
    """A tensor that a decomposition returns: the operand at `given`, or a new one of a step."""

    given: int = -1
    node: fx.Node | None = None
    like: torch.Tensor | None = None
    sizes: tuple[Any, ...] = ()  # then strides; a `_Same` for the very size of an operand


@dataclass(frozen=True)
class _Same:
    """The size at this place of all sizes of the operands."""

    at: int


@dataclass(frozen=True)
class _Recorded:
    """What a decomposition did: its operands' nodes, its steps and its results."""

    operands: tuple[fx.Node, ...]
    steps: tuple[_Step, ...]
    results: tuple[Any, ...]
    spec: pytree.TreeSpec


# By tracer, then by what a decomposition can ask of its operands; None if it cannot be copied.
_Known = WeakKeyDictionary[Any, dict[Hashable, _Recorded | None]]


def copying(table: Mapping[Any, Decomposition]) -> dict[Any, Decomposition]:
    """The same decompositions, each run once in a trace for equal operands."""
    known: _Known = WeakKeyDictionary()
    return {op: partial(_decomposed, known, op, plain) for op, plain in table.items()}


def _decomposed(known: _Known, op: Any, plain: Decomposition, *args: Any, **kwargs: Any) -> Any:
    mode = get_proxy_mode()
    if mode is None:
        return plain(*args, **kwargs)
    tracer: Any = mode.tracer
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    try:
        nodes = tuple(_node(each, tracer) for each in tensors)
        key = op, spec, tracer.enable_thunkify, _order(nodes), *_facts(leaves, tensors)
    except _NotAlike:
        return plain(*args, **kwargs)
    held = known.setdefault(tracer, {})
    if key not in held:
        before = tracer.graph._root._prev
        result = plain(*args, **kwargs)
        try:
            held[key] = _recorded(tracer, before, nodes, tensors, result)
        except _NotAlike:
            held[key] = None
        return result
    recorded = held[key]
    return plain(*args, **kwargs) if recorded is None else _copied(recorded, tracer, nodes, tensors)


def _node(tensor: torch.Tensor, tracer: Any) -> fx.Node:
    """The node of an operand, which must be no constant."""
    slot: Any = get_proxy_slot(tensor, tracer, None)
    if type(tensor) is not FakeTensor or slot is None or slot.constant is not None:
        raise _NotAlike
    node: fx.Node = slot.proxy.node
    return node


def _facts(leaves: Sequence[Any], tensors: Sequence[Any]) -> tuple[Hashable, ...]:
    """All that a decomposition can ask of its operands."""
    modes = {id(each.fake_mode): each.fake_mode for each in tensors}
    settings = torch.get_default_dtype(), torch.is_grad_enabled(), *map(_state, modes.values())
    return *settings, _order([id(each) for each in tensors]), *map(_fact, leaves)


def _order(operands: Sequence[Hashable]) -> tuple[int, ...]:
    """Which operands are the same as an earlier one."""
    return tuple(map(operands.index, operands))


def _state(mode: FakeTensorMode) -> Hashable:
    """It changes if symbols of sizes get other values or formulas, or need no guards."""
    sizes = mode.shape_env
    if sizes is None:
        return None
    held = vars(sizes)
    return held.get(_VERSIONS[0], held.get(_VERSIONS[1])), sizes._suppress_guards_tls()


def _fact(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        keys = torch._C._dispatch_keys(leaf).raw_repr()
        kind = leaf.dtype, leaf.device, keys, leaf.requires_grad
        sizes = (*leaf.shape, *leaf.stride(), leaf.storage_offset())
        return *kind, *map(_size, sizes)
    if isinstance(leaf, _SYMBOLIC):
        return _size(leaf)
    if type(leaf) not in _PLAIN:
        raise _NotAlike
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf


def _size(size: Any) -> Hashable:
    if isinstance(size, int):
        return size
    node = size.node
    if node._hint is None:
        raise _NotAlike
    return type(size), node._expr, node._hint


def _recorded(
    tracer: Any,
    before: fx.Node,
    operands: tuple[fx.Node, ...],
    tensors: Sequence[Any],
    result: Any,
) -> _Recorded:
    """The nodes behind `before`, if they depend on nothing but the operands and on sizes."""
    steps: list[_Step] = []
    inside: set[fx.Node] = set(operands)
    node = before._next
    while node is not tracer.graph._root:
        if any(each not in inside and not _is_size(each) for each in node.all_input_nodes):
            raise _NotAlike
        steps.append(_step(node))
        inside.add(node)
        node = node._next
    leaves, spec = pytree.tree_flatten(result)
    results = tuple(_result(each, tracer, inside, tensors) for each in leaves)
    made = {id(each.like): _memory(each.like) for each in results if _is_new(each)}
    apart = {*made.values()} - {_memory(each) for each in tensors}
    if len(apart) < len(made):  # views, of operands or of each other
        raise _NotAlike
    return _Recorded(operands, tuple(steps), results, spec)


def _is_new(result: Any) -> bool:
    return isinstance(result, _Result) and result.like is not None


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), _SYMBOLIC)


def _step(node: fx.Node) -> _Step:
    target = node.target
    mutable = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    if node.op != "call_function" or mutable or "unbacked_bindings" in node.meta:
        raise _NotAlike
    base, _, number = node.name.rpartition("_")
    name = base if base and number.isdigit() else node.name
    meta = {key: node.meta[key] for key in _KNOWN_META if key in node.meta}
    return _Step(node, node.op, target, node.args, node.kwargs, name, meta)


def _result(leaf: Any, tracer: Any, inside: set[fx.Node], tensors: Sequence[Any]) -> Any:
    if type(leaf) in _PLAIN:
        return leaf
    for at, each in enumerate(tensors):
        if leaf is each:
            return _Result(given=at)
    if not isinstance(leaf, torch.Tensor) or leaf.requires_grad:
        raise _NotAlike
    node = _node(leaf, tracer)
    if node not in inside or leaf.layout is not torch.strided:
        raise _NotAlike
    _fact(leaf)  # refuses sizes without an example
    return _Result(node=node, like=leaf, sizes=_traced(leaf, tensors))


def _all_sizes(tensors: Sequence[Any]) -> list[Any]:
    return [size for each in tensors for size in (*each.shape, *each.stride())]


def _traced(result: torch.Tensor, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The sizes and strides of a result. A tracer follows a size by the identity of its node."""
    known = {
        id(x.node): at for at, x in reversed([*enumerate(_all_sizes(tensors))]) if _symbolic(x)
    }
    sizes = (*result.shape, *result.stride())
    at = [known.get(id(each.node)) if _symbolic(each) else None for each in sizes]
    return tuple(x if y is None else _Same(y) for x, y in zip(sizes, at, strict=True))


def _symbolic(size: Any) -> bool:
    return not isinstance(size, int)


def _copied(
    recorded: _Recorded, tracer: Any, operands: Sequence[fx.Node], tensors: Sequence[Any]
) -> Any:
    """The results of the same steps for other operands."""
    now = dict(zip(recorded.operands, operands, strict=True))

    def current(node: fx.Node) -> fx.Node:
        return now.get(node, node)

    for step in recorded.steps:
        args, kwargs = (fx.map_arg(each, current) for each in (step.args, step.kwargs))
        made = tracer.create_node(step.op, step.target, args, kwargs, step.name)
        made.meta.update(step.meta)
        now[step.node] = made
    fresh: dict[fx.Node, Any] = {}
    with disable_proxy_modes_tracing():
        leaves = [_given_back(each, tracer, now, tensors, fresh) for each in recorded.results]
    return pytree.tree_unflatten(leaves, recorded.spec)


def _given_back(
    result: Any,
    tracer: Any,
    now: Mapping[fx.Node, fx.Node],
    tensors: Sequence[Any],
    fresh: dict[fx.Node, Any],
) -> Any:
    if not isinstance(result, _Result):
        return result
    if result.node is None:
        return tensors[result.given]
    if result.node not in fresh:
        proxy = tracer.proxy(now[result.node])
        made = _another(result, tensors)
        fresh[result.node] = track_tensor_tree(made, proxy, constant=None, tracer=tracer)
    return fresh[result.node]


def _another(result: _Result, tensors: Sequence[Any]) -> FakeTensor:
    """A fake tensor of the same kind, in memory of its own."""
    like: Any = result.like
    given = _all_sizes(tensors)
    sizes = [given[x.at] if isinstance(x, _Same) else _renewed(x) for x in result.sizes]
    with in_kernel_invocation_manager(like.fake_mode):
        dims = like.dim()
        empty = torch.empty_strided(sizes[:dims], sizes[dims:], dtype=like.dtype, device="meta")
    return FakeTensor(like.fake_mode, empty, like.device)


def _renewed(size: Any) -> Any:
    """The size with a node of its own."""
    if not _symbolic(size):
        return size
    node = object.__new__(type(size.node))
    node.__dict__.update(size.node.__dict__)
    return torch.SymInt(node)  # type: ignore[no-untyped-call]
