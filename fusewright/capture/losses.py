"""Losses by class, in the joint graph: selections by index, where PyTorch gathers and scatters.

    loss[i]  = -w[t[i]] · x[i, t[i]] = -Σ_c (w[c] · x[i, c] where c = t[i], else 0)
    dx[i, c] = -w[t[i]] · dloss[i] where c = t[i], else 0

If x is a log-softmax, a loop reads its rows anyway and computes both on the way: x is neither
written nor saved. In other cases, and on the host, PyTorch's operators stay. For an invalid class,
PyTorch's host operators name the class; on a GPU an assertion fails.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fusewright.capture.nodes import Nodes, aten

LOOPS = ("cuda",)
CLASSES_AT = 1  # the dimension of the classes
_BACKWARD: dict[Any, Any] = {
    aten.nll_loss_forward.default: aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default: aten.nll_loss2d_backward.default,
}
_RANKS: dict[Any, int] = {aten.nll_loss_forward.default: 2, aten.nll_loss2d_forward.default: 4}
_TYPES = (torch.float32, torch.float64)
_NONE, _MEAN = 0, 1  # PyTorch's numbers for reductions

torch.library.define(
    "fusewright::class_index", "(Tensor target, int classes, int ignored) -> Tensor"
)


@torch.library.impl("fusewright::class_index", "default")
def _class_index(target: Tensor, classes: int, ignored: int) -> Tensor:
    """The target itself, after a check that every class exists."""
    beyond = (target != ignored) & ((target < 0) | (target >= classes))
    if bool(beyond.any()):
        raise IndexError(f"Target {int(target[beyond][0])} is out of bounds.")
    return target.clone()


@dataclass(frozen=True)
class _Loss:
    """One loss and, if there is one, its gradient."""

    node: fx.Node
    backward: fx.Node | None
    scores: Any
    target: Any
    weights: Any
    reduction: int
    ignored: int

    @property
    def classes(self) -> Any:
        return self.scores.meta["val"].shape[CLASSES_AT]


def with_class_losses(joint: fx.GraphModule) -> None:
    """Replace losses by selections wherever loops gain from it."""
    for node in list(joint.graph.nodes):
        loss = _found(node) if node.target in _BACKWARD else None
        if loss is not None and _may_loop(loss):
            _Choice(joint.graph, loss).replace()
    joint.recompile()


def _found(node: fx.Node) -> _Loss | None:
    """None if another operator reads the sum of the weights."""
    items = [user for user in node.users if user.target is operator.getitem]
    asking = [user for item in items if item.args[1] == 1 for user in item.users]
    if any(user.target is not _BACKWARD[node.target] for user in asking) or len(asking) > 1:
        return None
    arguments: Any = node.args
    return _Loss(node, asking[0] if asking else None, *arguments)


def _may_loop(loss: _Loss) -> bool:
    scores, target = loss.scores.meta["val"], loss.target.meta["val"]
    held = [scores, target, *([loss.weights.meta["val"]] if loss.weights is not None else [])]
    return (
        scores.dim() == _RANKS[loss.node.target]
        and scores.dtype in _TYPES
        and target.dtype == torch.int64
        and isinstance(loss.classes, int)
        and 0 < loss.classes < 2**31
        and all(each.device == scores.device for each in held)
        and scores.device.type in LOOPS
        and _less_row(loss.scores) is not None
    )


@dataclass(frozen=True)
class _Less:
    """Scores that are `whole` minus one value per row, `row`, viewed in shape `sizes` if given."""

    whole: fx.Node
    row: fx.Node
    sizes: tuple[Any, ...] = ()


def _less_row(scores: fx.Node) -> _Less | None:
    sizes: tuple[Any, ...] = ()
    if scores.target is aten.view.default:
        inner, given = scores.args
        assert isinstance(inner, fx.Node) and isinstance(given, list | tuple)
        held, seen = inner.meta["val"].shape, scores.meta["val"].shape
        if len(held) <= CLASSES_AT or held[CLASSES_AT] != seen[CLASSES_AT] or held[0] != seen[0]:
            return None
        scores, sizes = inner, tuple(given)
    if scores.target is not aten.sub.Tensor or scores.kwargs:
        return None
    left, right = scores.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    # Neither operand is broadcast along another dimension.
    whole = list(scores.meta["val"].shape)
    row = [1 if at == CLASSES_AT else size for at, size in enumerate(whole)]
    shapes = [list(each.meta["val"].shape) for each in (left, right)]
    computed = right.op == "call_function" and whole[CLASSES_AT] != 1
    return _Less(left, right, sizes) if computed and shapes == [whole, row] else None


class _Choice:
    """The nodes that replace a loss."""

    def __init__(self, graph: fx.Graph, loss: _Loss) -> None:
        self.graph, self.loss, self.made = graph, loss, Nodes(graph, loss.node)
        self.call = self.made.call
        self.dtype = loss.scores.meta["val"].dtype

    def replace(self) -> None:
        loss = self.loss
        with self.graph.inserting_before(loss.node):
            hits = self._hits(self._checked())
            chosen = self._chosen(loss.scores, hits)
            weight = None
            if loss.weights is not None:
                by_class = self.made.along(loss.scores, CLASSES_AT, loss.weights)
                weight = self._sum_of_hits(by_class, hits)
                chosen = self.call(aten.mul.Tensor, weight, chosen)
            counted = self.call(aten.ne.Scalar, loss.target, loss.ignored)
            result = self._where(counted, self.call(aten.neg.default, chosen))
            total = None
            if loss.reduction == _MEAN:
                ones = self.call(aten._to_copy.default, counted, dtype=self.dtype)
                weights = ones if weight is None else self._where(counted, weight)
                total = self.call(aten.sum.default, weights)
                result = self.call(aten.sum.default, result)
                result = self.call(aten.div.Tensor, result, total)
            elif loss.reduction != _NONE:
                result = self.call(aten.sum.default, result)
        if loss.backward is not None:
            self._replace_gradient(loss.backward, counted, weight, total)
        for item in list(loss.node.users):
            if item.args[1] == 0:
                item.replace_all_uses_with(result)
            self.graph.erase_node(item)
        self.graph.erase_node(loss.node)

    def _replace_gradient(self, node: Any, counted: fx.Node, weight: Any, total: Any) -> None:
        with self.graph.inserting_before(node):
            grad = self.call(aten.neg.default, node.args[0])
            if total is not None:
                grad = self.call(aten.div.Tensor, grad, total)
            if weight is not None:
                grad = self.call(aten.mul.Tensor, grad, weight)
            row = self._row(self._where(counted, grad))
            found = self._where(self._hits(self.loss.target), row)
        for user in list(node.users):
            # Each row has one nonzero element, so this sum is that element.
            if user.target is aten.sum.dim_IntList and user.args[1:] == ([CLASSES_AT], True):
                user.replace_all_uses_with(row)
                self.graph.erase_node(user)
        node.replace_all_uses_with(found)
        self.graph.erase_node(node)

    def _checked(self) -> fx.Node:
        loss, op = self.loss, torch.ops.fusewright.class_index.default
        like = torch.empty_like(loss.target.meta["val"])
        return self.made.known(like, op, loss.target, loss.classes, loss.ignored)

    def _chosen(self, scores: fx.Node, hits: fx.Node) -> fx.Node:
        """The score of the target class, before the row's value is subtracted, minus that value."""
        found = _less_row(scores)
        if found is None:
            return self._sum_of_hits(scores, hits)
        whole, row = found.whole, found.row
        if found.sizes:
            one = [1 if at == CLASSES_AT else each for at, each in enumerate(found.sizes)]
            whole = self.call(aten.view.default, whole, list(found.sizes))
            row = self.call(aten.view.default, row, one)
        beside = self.call(aten.squeeze.dim, row, CLASSES_AT)
        return self.call(aten.sub.Tensor, self._chosen(whole, hits), beside)

    def _hits(self, target: fx.Node) -> fx.Node:
        """Whether an element is at its row's class."""
        index = self.made.index_along(self.loss.scores, CLASSES_AT)
        return self.call(aten.eq.Tensor, index, self._row(self.made.as_int32(target)))

    def _sum_of_hits(self, value: fx.Node, hits: fx.Node) -> fx.Node:
        return self.call(aten.sum.dim_IntList, self._where(hits, value), [CLASSES_AT])

    def _row(self, value: fx.Node) -> fx.Node:
        return self.call(aten.unsqueeze.default, value, CLASSES_AT)

    def _where(self, flags: fx.Node, value: fx.Node) -> fx.Node:
        """The value, or zero."""
        kind: Any = {"dtype": self.dtype, "device": flags.meta["val"].device}
        return self.call(
            aten.where.self, flags, value, self.call(aten.full.default, [], 0.0, **kind)
        )
