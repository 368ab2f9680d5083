"""Operators with an effect besides their results, such as the check in torch.linalg.inv.

AOTAutograd wraps each in `with_effects` and threads a token through all of them: an empty tensor
that fixes their order. The partitioner needs the tokens. Our graphs keep the order of their nodes,
so the tokens end here. The input is one graph of the partition; the output calls the operators
directly and marks them as ones that must run. Graphs of Dynamo pass the tokens on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.effects import _EffectType, _get_effect, _register_effectful_op

_CHECK = "aten::_linalg_check_errors"
_MARK = "fusewright_effect"
# These raise if a value is not what the trace assumed; AOTAutograd does not wrap them.
_ASSERTIONS = (torch.ops.aten._assert_async.msg, torch.ops.aten._assert_scalar.default)


@contextlib.contextmanager
def checks_kept() -> Iterator[None]:
    """Traces keep the check of torch.linalg. PyTorch before 2.12 drops it: nothing reads it."""
    if _get_effect(_CHECK) is not None:
        yield
        return
    handle = _register_effectful_op(_CHECK, _EffectType.ORDERED)
    try:
        yield
    finally:
        handle.destroy()


def is_token(label: Any) -> bool:
    """Whether an input or output of a traced graph is a token, by its label."""
    return "TokenAOT" in type(label).__name__


def has_effect(node: fx.Node) -> bool:
    """Whether an operator must run even if nothing reads its result."""
    return _MARK in node.meta or node.target in _ASSERTIONS


def without_tokens(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with its effectful operators called directly, in the same order."""
    wrapped = [node for node in module.graph.nodes if _is_wrapped(node)]
    held = [node for node in module.graph.nodes if is_token(node.meta.get("desc"))]
    tokens = {each for node in wrapped for each in node.users if _index(each) == 0} | {*held}
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    flat = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
    output.args = (tuple(each for each in flat if each not in tokens),)
    _unwrap_all(module, wrapped)
    for node in held:
        module.graph.erase_node(node)
    module.recompile()
    return module


def tokens_passed_on(module: fx.GraphModule) -> frozenset[fx.Node]:
    """The tokens among a graph's arguments. It returns them as they come, where its caller expects
    tokens, and calls effectful operators directly."""
    wrapped = [node for node in module.graph.nodes if _is_wrapped(node)]
    firsts = [node.args[0] for node in wrapped]
    tokens = frozenset(x for x in firsts if isinstance(x, fx.Node) and x.op == "placeholder")
    if wrapped:
        _unwrap_all(module, wrapped)
        module.recompile()
    return tokens


def _unwrap_all(module: fx.GraphModule, wrapped: Sequence[fx.Node]) -> None:
    # From last to first: each reads the token of the one before it.
    for node in reversed(wrapped):
        _unwrap(module.graph, node)


def _is_wrapped(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.higher_order.with_effects


def _index(node: fx.Node) -> int:
    position: Any = node.args[1]
    return int(position)


def _unwrap(graph: fx.Graph, node: fx.Node) -> None:
    """with_effects(token, op, …) returns (token, result), or (token, *results) for several."""
    token: Any = node.args[0]
    target: Any = node.args[1]
    several = isinstance(target, torch._ops.OpOverload) and len(target._schema.returns) > 1
    with graph.inserting_before(node):
        call = graph.call_function(target, tuple(node.args[2:]), dict(node.kwargs))
    results = tuple(node.meta.get("val") or (None, None))[1:]
    call.meta = {**node.meta, "val": results if several else results[0], _MARK: True}
    for each in list(node.users):
        if _index(each) and several:
            each.args = (call, _index(each) - 1)
            continue
        each.replace_all_uses_with(call if _index(each) else token)
        graph.erase_node(each)
    graph.erase_node(node)
