"""Symbolic sizes that remember their arithmetic while a model is traced.

PyTorch computes numels, strides and layouts of every fake tensor with symbolic integers, in Python
and with sympy. A model asks the same few questions again for each of its tensors. Here each answer
is kept for as long as the trace runs. A tracer follows a number by the identity of its node,
so each answer is a new node, as in PyTorch, and what a tracer itself asks is not remembered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Each result depends on the two expressions alone. `mod` is not here: it asks for ranges, too.
_BINARY = """
    add sub mul eq ne gt lt le ge and_ or_ sym_max sym_min float_truediv int_truediv int_floordiv
"""
_NUMBERS = (int, bool, float)
_PROXY = torch._C._TorchDispatchModeKey.PROXY

Plain = Callable[..., Any]


@contextlib.contextmanager
def remembered(shape_env: ShapeEnv) -> Iterator[None]:
    """Answers about the sizes of `shape_env` are remembered while the block runs."""
    makers: dict[tuple[type, str], Callable[[Plain, ShapeEnv], Plain]] = {
        (SymNode, name): _binary for name in _BINARY.split()
    }
    makers[SymNode, "maybe_as_int"] = _as_int
    makers[SymNode, "wrap_int"] = _wrap_int
    makers[ShapeEnv, "evaluate_sym_node"] = _evaluate
    makers[FunctionalTensor, "__new__"] = _untraced
    plain = {(owner, name): vars(owner)[name] for owner, name in makers}
    # A guard names the function that asked for it. That is never one of ours.
    symbolic_shapes.uninteresting_files().add(__file__)
    try:
        for (owner, name), make in makers.items():
            setattr(owner, name, make(plain[owner, name], shape_env))
        yield
    finally:
        for (owner, name), each in plain.items():
            setattr(owner, name, each)


def _untraced(plain: Any, _: ShapeEnv) -> Any:
    """A functional tensor. Its constructor computes how much memory it would need, which no graph
    reads. A tracer would follow the ten steps of that, for each tensor."""
    build, tracer = plain.__func__, torch._C._get_dispatch_mode

    def run(cls: Any, elem: torch.Tensor, mode: Any) -> Any:
        if tracer(_PROXY) is None:
            return build(cls, elem, mode)
        with disable_proxy_modes_tracing():
            return build(cls, elem, mode)

    return staticmethod(run)


def _version(shape_env: ShapeEnv) -> str:
    """The name of the attribute that changes if symbols get other values or formulas."""
    exact = "_replacements_version_counter"
    return exact if hasattr(shape_env, exact) else "_version_counter"  # PyTorch before 2.13


def _copy(held: dict[str, Any]) -> SymNode:
    made = SymNode.__new__(SymNode)
    made.__dict__.update(held)
    return made


def _binary(plain: Plain, shape_env: ShapeEnv) -> Plain:
    known: dict[Any, dict[str, Any]] = {}
    mode_of, state, version = torch._C._get_dispatch_mode, vars(shape_env), _version(shape_env)

    def run(self: Any, other: Any) -> Any:
        ours = self.shape_env is shape_env and other.shape_env is shape_env
        if not ours or mode_of(_PROXY) is not None:
            return plain(self, other)
        one, two = self.constant, other.constant
        key = (
            self._expr if one is None else one,
            other._expr if two is None else two,
            self._hint,
            other._hint,
            self.pytype,
            other.pytype,
            state[version],
        )
        held = known.get(key)
        if held is not None:
            return _copy(held)
        node = plain(self, other)
        if _is_new(node, self, other):
            known[key] = node.__dict__.copy()
        return node

    return run


def _is_new(node: Any, self: Any, other: Any) -> bool:
    """Whether an answer may be kept: numbers of known size gave a node of its own."""
    hints = type(self._hint) in _NUMBERS and type(other._hint) in _NUMBERS
    summed = self._optimized_summation or other._optimized_summation
    own = node is not self and node is not other and node.constant is None
    return hints and own and not summed


def _as_int(plain: Plain, shape_env: ShapeEnv) -> Plain:
    """A node's own number, if it has one. It keeps the answer, and so do its copies."""
    state, version = vars(shape_env), _version(shape_env)

    def run(self: Any) -> Any:
        if self.shape_env is not shape_env:
            return plain(self)
        held, now = self.__dict__, state[version]
        found = held.get("_as_int")
        if found is None or found[0] != now:
            found = held["_as_int"] = (now, plain(self))
        return found[1]

    return run


def _wrap_int(plain: Plain, shape_env: ShapeEnv) -> Plain:
    known: dict[int, dict[str, Any]] = {}

    def run(self: Any, number: int) -> Any:
        if self.shape_env is not shape_env or type(number) is not int:
            return plain(self, number)
        held = known.get(number)
        if held is None:
            node = plain(self, number)
            known[number] = node.__dict__.copy()
            return node
        return _copy(held)

    return run


def _evaluate(plain: Plain, shape_env: ShapeEnv) -> Plain:
    """The value of a node, with a guard where one is needed. It was added with the first answer."""
    known: dict[Any, Any] = {}
    state, version = vars(shape_env), _version(shape_env)

    def run(self: Any, node: Any, *rest: Any, **more: Any) -> Any:
        if self is not shape_env or type(node._hint) not in _NUMBERS:
            return plain(self, node, *rest, **more)
        key = (
            node._expr,
            node._hint,
            node.pytype,
            rest,
            *more.items(),
            shape_env._suppress_guards_tls(),
            state[version],
        )
        found = known.get(key)
        if found is None:
            found = known[key] = plain(self, node, *rest, **more)
        return found

    return run
