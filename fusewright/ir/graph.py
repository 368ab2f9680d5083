"""The graph language of every stage after `capture`.

A `Program` holds one model in one mode (train or eval): a forward `Graph`, a backward `Graph`, and
the labels that connect their inputs and outputs to parameters, buffers and arguments. Everything is
frozen and free of torch: dtypes are names, sizes are `Dim`s, operators are text. `validate`
guarantees that every value is defined once, before its use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fusewright.errors import GraphError
from fusewright.ir.effect import Circumstances

HALF_DTYPES = ("float16", "bfloat16")
FLOATS = (*HALF_DTYPES, "float32", "float64")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
LOOP_DTYPES = (*FLOATS, *INTEGERS, "bool")
# Layers that stay PyTorch calls: torch.lstm, and torch.lstm_backward for its gradients.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True)
class Dim:
    """A size or stride: an integer factor times a product of symbols, such as 64·s0.

    Nothing else is needed for the symbol of the first dimension. If a shape needs more, `capture`
    fixes that symbol to the example's size.
    """

    factor: int = 1
    symbols: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.symbols) > (1 if self.factor else 0):
            object.__setattr__(self, "symbols", tuple(sorted(self.symbols)) if self.factor else ())

    @property
    def is_static(self) -> bool:
        return not self.symbols

    def __mul__(self, other: Dim | int) -> Dim:
        other = dim(other)
        if other.factor == 1 and not other.symbols:
            return self
        return Dim(self.factor * other.factor, self.symbols + other.symbols)

    def divided_by(self, other: Dim | int) -> Dim | None:
        """The exact quotient, or None if some size leaves a remainder."""
        other = dim(other)
        if other.factor == 0 or self.factor % other.factor:
            return None
        rest = Counter(self.symbols)
        rest.subtract(other.symbols)
        if min(rest.values(), default=0) < 0:
            return None
        return Dim(self.factor // other.factor, tuple(rest.elements()))

    def at(self, sizes: Mapping[str, int]) -> int:
        """The number for given sizes of the symbols."""
        return self.factor * math.prod(sizes[symbol] for symbol in self.symbols)

    def __str__(self) -> str:
        if not self.symbols:
            return str(self.factor)
        product = "*".join(self.symbols)
        return product if self.factor == 1 else f"{self.factor}*{product}"


ONE, ZERO = Dim(1), Dim(0)
Sizes = Mapping[str, int]  # the values of symbols


def dim(value: Dim | int) -> Dim:
    return value if isinstance(value, Dim) else Dim(value)


def product(dims: Iterable[Dim]) -> Dim:
    factor = 1
    symbols: list[str] = []
    for each in dims:
        factor *= each.factor
        symbols += each.symbols
    return Dim(factor, tuple(symbols))


@dataclass(frozen=True)
class Ratio:
    """A real scalar computed from sizes, such as the 1/s0 of a mean over the batch.

    `text` is an expression of floating-point literals, + * / and symbols. It means the same in
    Python and in C++, where each symbol is a 64-bit integer, and it never divides two integers.
    """

    text: str

    def at(self, sizes: Mapping[str, int]) -> float:
        return float(eval(self.text, {"__builtins__": {}}, dict(sizes)))  # our own text

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class TensorSpec:
    """What is known about a tensor before it exists."""

    dtype: str
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    device: str = "cpu"

    @cached_property
    def numel(self) -> Dim:
        return product(self.shape)

    def bytes_at(self, sizes: Mapping[str, int]) -> int:
        return self.numel.at(sizes) * ITEM_BYTES.get(self.dtype, 1)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def contiguous_strides(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Row-major strides; a dimension of size zero counts as one, as in PyTorch."""
    strides: list[Dim] = []
    running = ONE
    for size in reversed(shape):
        strides.append(running)
        running = running * (size if size != ZERO else ONE)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Ref:
    """The value of another node, by name."""

    name: str


@dataclass(frozen=True)
class Symbolic:
    """A torch constant that is not a number: kind is dtype, device, layout or memory_format."""

    kind: str
    name: str


Arg = Ref | Symbolic | Dim | Ratio | int | float | bool | complex | str | None | tuple["Arg", ...]


@dataclass(frozen=True)
class Node:
    """One operator. `op` is an ATen overload (`aten.mm.default`), `getitem`, or a canonical name.

    `spec` is None for an operator with several results; `getitem` nodes select them. `random` marks
    an operator whose result differs at each run, `effect` one that must run even if nothing reads
    its result.
    """

    name: str
    op: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    spec: TensorSpec | None = None
    source: str | None = None
    random: bool = False
    effect: bool = False

    @property
    def is_aten(self) -> bool:
        return "." in self.op

    @property
    def layer(self) -> str:
        """The recurrent layer of this node, forward or gradients; empty for other operators."""
        name = self.op.removeprefix("torch.").removesuffix("_backward")
        return name if name in RECURRENT else ""

    @property
    def is_masked(self) -> bool:
        """Whether it computes several gradients, and only those that are asked for."""
        backward = self.op.endswith("_backward") and bool(self.layer)
        return backward or self.op == "aten.convolution_backward.default"

    def refs(self) -> tuple[str, ...]:
        """Names of the values this node reads, in order, each as often as it is read."""
        return self._read

    @cached_property
    def _read(self) -> tuple[str, ...]:
        return tuple(_refs((*self.args, tuple(value for _, value in self.kwargs))))

    def argument(self, name: str, position: int | None = None, default: Arg = None) -> Arg:
        """An argument that may be given by position or by name."""
        if position is not None and len(self.args) > position:
            return self.args[position]
        return dict(self.kwargs).get(name, default)

    def renamed(self, names: Mapping[str, str]) -> Node:
        """The same node, reading other values."""
        if all(names.get(name, name) == name for name in self.refs()):
            return self
        return replace(
            self,
            args=tuple(_rename(arg, names) for arg in self.args),
            kwargs=tuple((key, _rename(arg, names)) for key, arg in self.kwargs),
        )


def _refs(args: tuple[Arg, ...]) -> Iterator[str]:
    for arg in args:
        if isinstance(arg, Ref):
            yield arg.name
        elif isinstance(arg, tuple):
            yield from _refs(arg)


def _rename(arg: Arg, names: Mapping[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names.get(arg.name, arg.name))
    if isinstance(arg, tuple):
        return tuple(_rename(item, names) for item in arg)
    return arg


@dataclass(frozen=True)
class Input:
    name: str
    spec: TensorSpec


@dataclass(frozen=True)
class Graph:
    """Nodes in an order that can be run. An output is a value's name, a `Dim`, or None."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str | Dim | None, ...]

    def specs(self) -> dict[str, TensorSpec | None]:
        """The spec of each value. Everyone is given the same dictionary."""
        return self._specs

    @cached_property
    def _specs(self) -> dict[str, TensorSpec | None]:
        known: dict[str, TensorSpec | None] = {each.name: each.spec for each in self.inputs}
        known.update((node.name, node.spec) for node in self.nodes)
        return known

    def users(self) -> dict[str, list[Node]]:
        """For each value, the nodes that read it, once each. Outputs do not count."""
        return self._users

    @cached_property
    def _users(self) -> dict[str, list[Node]]:
        readers: dict[str, list[Node]] = {name: [] for name in self.specs()}
        for node in self.nodes:
            for name in dict.fromkeys(node.refs()):
                readers[name].append(node)
        return readers

    def pruned(self) -> Graph:
        """The same graph without nodes that no output needs."""
        live = {name for name in self.outputs if isinstance(name, str)}
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if node.name in live or node.effect:
                kept.append(node)
                live.update(node.refs())
        return replace(self, nodes=tuple(reversed(kept)))


@dataclass(frozen=True)
class Binding:
    """Where a forward input comes from: kind is parameter, buffer, input or constant.

    `path` is the dotted attribute of a parameter, buffer or constant; for an input it is the
    position among the tensors of the flattened arguments. `differentiable`: backward has a gradient
    for it.
    """

    kind: str
    path: str
    differentiable: bool


@dataclass(frozen=True)
class ForwardOutput:
    """What a forward output is: kind is output, mutation (of binding `index`) or saved."""

    kind: str
    index: int


@dataclass(frozen=True)
class Symbol:
    """Dimension `dim` of forward input `input_index`, read when the module runs, as a multiple."""

    name: str
    input_index: int
    dim: int
    example: int
    multiple: int = 1  # the size is so many of the symbol


@dataclass(frozen=True)
class Program(Circumstances):
    """One model in one mode.

    forward: inputs as `bindings`; outputs as `results`, those of kind saved last.
    backward: inputs are the saved values, then one tangent for each output position in `tangents`;
    outputs are one gradient (or None) per binding.
    inference: the forward graph without the saved outputs.
    guards: Python expressions over the symbols that must hold for this program to be used.
    reach: for each tangent, the bindings that autograd can reach from its output. An output is not
    differentiable if none of these requires a gradient, as in eager mode.
    output_tree: Python text that builds the model's return value from the results, `o`, and the
    bindings, `tensors`; output_types are the classes that it names.
    """

    mode: str
    bindings: tuple[Binding, ...]
    symbols: tuple[Symbol, ...]
    guards: tuple[str, ...]
    forward: Graph
    results: tuple[ForwardOutput, ...]
    backward: Graph | None
    tangents: tuple[int, ...]
    inference: Graph
    output_tree: str
    reach: tuple[tuple[int, ...], ...] = ()
    output_types: tuple[tuple[str, type], ...] = ()

    @property
    def example_sizes(self) -> dict[str, int]:
        return {symbol.name: symbol.example for symbol in self.symbols}


def validate(graph: Graph) -> None:
    """Raise GraphError unless every value is defined once, before its use, and outputs exist."""
    defined: set[str] = set()
    for each in graph.inputs:
        _define(each.name, defined)
    for node in graph.nodes:
        for name in node.refs():
            if name not in defined:
                raise GraphError(f"{node.name} = {node.op} reads {name!r} before it is defined")
        _define(node.name, defined)
    for output in graph.outputs:
        if isinstance(output, str) and output not in defined:
            raise GraphError(f"output {output!r} is not defined by the graph")


def _define(name: str, defined: set[str]) -> None:
    if name in defined:
        raise GraphError(f"value {name!r} is defined twice")
    defined.add(name)


def pretty(graph: Graph) -> str:
    """The graph as text, one line per node."""
    lines = [f"input {each.name}: {each.spec}" for each in graph.inputs]
    for node in graph.nodes:
        args = ", ".join(_show(arg) for arg in node.args)
        named = "".join(f", {key}={_show(value)}" for key, value in node.kwargs)
        where = f"    # {node.source}" if node.source else ""
        kind = f": {node.spec}" if node.spec else ""
        lines.append(f"{node.name}{kind} = {node.op}({args}{named}){where}")
    lines.append("return " + ", ".join(str(output) for output in graph.outputs))
    return "\n".join(lines)


def _show(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return arg.name
    if isinstance(arg, tuple):
        return "[" + ", ".join(_show(item) for item in arg) + "]"
    if isinstance(arg, Symbolic):
        return arg.name
    return str(arg) if isinstance(arg, Dim | Ratio) else repr(arg)
