"""From torch.fx to our graph language, node by node.

Symbolic integers end here: a symbolic argument becomes a `Dim` or a `Ratio`. A size that is neither
raises `InexpressibleSizeError`, and `capture` starts again with fixed sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv, ToFloat
from torch.utils._sympy.printers import PythonPrinter

from fusewright.capture.effects import has_effect
from fusewright.capture.recurrent import draws, node_op
from fusewright.capture.source_location import DATA_DEPENDENT, GENERATOR, HIGHER_ORDER
from fusewright.errors import CaptureError
from fusewright.ir.graph import (
    Arg,
    Binding,
    Dim,
    Graph,
    Input,
    Node,
    Ratio,
    Ref,
    Symbolic,
    TensorSpec,
)

MAX_LITERAL = 4096


class InexpressibleSizeError(Exception):
    """A size is not a product of symbols; capture must fix the sizes."""


class InexpressibleForwardError(InexpressibleSizeError):
    """Such a size is in the forward graph, whichever gradients are taken."""


def inexpressible(expr: Any) -> Exception:
    """The error for a size that we cannot write: it depends on data, or sizes must be fixed."""
    if free_unbacked_symbols(expr):
        return CaptureError(DATA_DEPENDENT)
    return InexpressibleSizeError(str(expr))


class Converter:
    """Copies fx graphs of one trace, and collects the tensors that are neither inputs nor state."""

    def __init__(self, model: nn.Module, symbols: Mapping[Any, str]) -> None:
        self._model = model
        self._symbols = dict(symbols)
        self._constants: dict[str, tuple[Binding, TensorSpec]] = {}
        self._same: dict[str, str] = {}
        self._sizes: dict[Any, Dim] = {}

    @property
    def constant_bindings(self) -> tuple[Binding, ...]:
        return tuple(binding for binding, _ in self._constants.values())

    def with_constants(self, graph: Graph) -> Graph:
        """Make tensor attributes of the model that are not buffers inputs of every graph."""
        extra = tuple(Input(name, spec) for name, (_, spec) in self._constants.items())
        return replace(graph, inputs=graph.inputs + extra)

    def with_saved_constants(self, backward: Graph, position: int) -> tuple[Graph, tuple[str, ...]]:
        """The backward graph takes the constants it reads as saved values, from `position` on."""
        read = {name for node in backward.nodes for name in node.refs()}
        used = tuple(name for name in self._constants if name in read)
        extra = tuple(Input(name, self._constants[name][1]) for name in used)
        inputs = backward.inputs[:position] + extra + backward.inputs[position:]
        return replace(backward, inputs=inputs), used

    def graph(self, module: fx.GraphModule) -> Graph:
        inputs: list[Input] = []
        nodes: list[Node] = []
        outputs: tuple[str | Dim | None, ...] = ()
        _refuse_functions_of_functions(module)
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder":
                if isinstance(value, torch.Tensor):
                    inputs.append(Input(node.name, self.spec(value)))
            elif node.op == "output":
                flat = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
                outputs = tuple(self._output(item) for item in flat)
            elif node.op == "get_attr":
                nodes += self._attribute(module, node)
            elif not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                nodes.append(self._node(node, value))
        return Graph(tuple(inputs), tuple(nodes), outputs).pruned()

    def _node(self, node: fx.Node, value: Any) -> Node:
        op = "getitem" if node.target is operator.getitem else None
        op = op or node_op(node.target) or str(node.target)
        spec = self.spec(value) if isinstance(value, torch.Tensor) else None
        return Node(
            name=node.name,
            op=op,
            args=tuple(self.arg(arg) for arg in node.args),
            kwargs=tuple((key, self.arg(arg)) for key, arg in node.kwargs.items()),
            spec=spec,
            source=_source_line(node),
            random=is_random(node),
            effect=has_effect(node),
        )

    def spec(self, value: torch.Tensor) -> TensorSpec:
        return TensorSpec(
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(self.size(size) for size in value.shape),
            strides=tuple(self.size(stride) for stride in _strides(value)),
            device=value.device.type,
        )

    def size(self, value: int | torch.SymInt) -> Dim:
        if isinstance(value, int):
            return Dim(value)
        expr = value.node.expr
        if expr not in self._sizes:
            self._sizes[expr] = self._size(expr)
        return self._sizes[expr]

    def _size(self, expr: Any) -> Dim:
        scale, symbols = self._monomial(expr)
        if scale.denominator != 1 or any(power < 0 for power in symbols.values()):
            raise inexpressible(expr)
        names = [name for name, power in symbols.items() for _ in range(power)]
        return Dim(int(scale), tuple(names))

    def scalar(self, value: torch.SymInt | torch.SymFloat) -> Dim | Ratio:
        """A symbolic number as an argument: a `Dim` if it is an integer, otherwise a formula."""
        if isinstance(value, torch.SymInt):
            return self.size(value)
        return Ratio(self._formula(_without_torch_functions(value.node.expr)))

    def _formula(self, expr: Any) -> str:
        if expr.is_number:
            return repr(float(expr))
        if expr in self._symbols:
            return f"(1.0*{self._symbols[expr]})"
        if expr.is_Add or expr.is_Mul:
            sign = " + " if expr.is_Add else "*"
            return "(" + sign.join(self._formula(arg) for arg in expr.args) + ")"
        if expr.is_Pow and expr.exp.is_Integer and abs(int(expr.exp)) <= 4:
            factors = "*".join([self._formula(expr.base)] * abs(int(expr.exp)))
            return f"({factors})" if expr.exp > 0 else f"(1.0/({factors}))"
        raise inexpressible(expr)

    def _monomial(self, expr: Any) -> tuple[Fraction, dict[str, int]]:
        """expr = scale · Π symbol^power, or InexpressibleSizeError."""
        plain = _without_torch_functions(sympy.sympify(expr))
        rest = sympy.simplify(plain)
        rest = sympy.factor(rest) if rest.is_Add else rest
        powers: dict[str, int] = {}
        scale = Fraction(1)
        for factor in sympy.Mul.make_args(rest):
            base, power = factor.as_base_exp()
            if factor.is_number:
                scale *= _fraction(factor)
            elif base in self._symbols and power.is_Integer:
                name = self._symbols[base]
                powers[name] = powers.get(name, 0) + int(power)
            else:
                name = self._other_size(base, power)
                powers[name] = powers.get(name, 0) + 1
        return scale, powers

    def _other_size(self, base: Any, power: Any) -> str:
        """The name of a factor that is no power of a symbol."""
        raise inexpressible(base**power)

    def arg(self, value: Any) -> Arg:
        if isinstance(value, fx.Node):
            held = value.meta.get("val")
            if isinstance(held, torch.SymInt | torch.SymFloat):
                return self.scalar(held)
            return Ref(self._same.get(value.name, value.name))
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return self.scalar(value)
        if value is None or isinstance(value, bool | int | float | complex | str):
            return value
        if isinstance(value, list | tuple):
            return tuple(self.arg(item) for item in value)
        kinds = {
            torch.dtype: "dtype",
            torch.device: "device",
            torch.layout: "layout",
            torch.memory_format: "memory_format",
        }
        if type(value) in kinds:
            text = value.type if isinstance(value, torch.device) else str(value)
            return Symbolic(kinds[type(value)], text.removeprefix("torch."))
        if isinstance(value, torch.Generator):
            raise CaptureError(GENERATOR)
        raise CaptureError(
            f"an operator takes a {type(value).__name__} argument, which we cannot write as text; "
            "pass tensors, numbers or strings"
        )

    def _output(self, item: Any) -> str | Dim | None:
        if item is None:
            return None
        held = item.meta.get("val") if isinstance(item, fx.Node) else item
        if isinstance(held, int | torch.SymInt):
            return self.size(held)
        if not isinstance(item, fx.Node):
            raise CaptureError(f"an output is a {type(item).__name__}; return tensors")
        return self._same.get(item.name, item.name)

    def _attribute(self, module: fx.GraphModule, node: fx.Node) -> list[Node]:
        """A tensor that the model holds outside its parameters and buffers, or a literal."""
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Generator):
            raise CaptureError(GENERATOR)
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise CaptureError(f"forward uses a {kind} as if it were a tensor; use a tensor")
        path = _attribute_path(self._model, value)
        spec = self.spec(value)
        if path is not None:
            binding = Binding("constant", path, False)
            known = (n for n, (other, _) in self._constants.items() if other == binding)
            first = next(known, node.name)
            self._constants[first] = (binding, spec)
            self._same[node.name] = first
            return []
        if value.numel() > MAX_LITERAL:
            raise CaptureError(
                f"the model makes a constant of {value.numel()} elements in forward; "
                "register it as a buffer"
            )
        literal = _literal(value.detach().cpu().tolist())
        return [Node(node.name, "literal", (literal,), (), spec)]


def _refuse_functions_of_functions(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        target: Any = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise CaptureError(HIGHER_ORDER.format(str(target)))


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or draws(node)


def _strides(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.stride()) if value.layout is torch.strided else (0,) * value.dim()


def _literal(value: Any) -> Arg:
    return tuple(_literal(item) for item in value) if isinstance(value, list) else value


def _without_torch_functions(expr: Any) -> Any:
    """PyTorch's own division and conversion nodes, written as plain sympy."""
    if isinstance(expr, IntTrueDiv | FloatTrueDiv):
        over, under = (_without_torch_functions(arg) for arg in expr.args)
        return over / under
    if isinstance(expr, ToFloat):
        return _without_torch_functions(expr.args[0])
    if expr.args and not expr.is_Symbol:
        return expr.func(*(_without_torch_functions(arg) for arg in expr.args))
    return expr


def _fraction(number: Any) -> Fraction:
    if number.is_Rational:
        return Fraction(int(number.p), int(number.q))
    value = float(number)
    if not math.isfinite(value):
        raise InexpressibleSizeError(str(number))
    return Fraction(value)


def _attribute_path(model: nn.Module, tensor: torch.Tensor) -> str | None:
    """The dotted path at which the model holds this very tensor as an attribute."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if value is tensor:
                return f"{prefix}.{name}" if prefix else name
    return None


def _source_line(node: fx.Node) -> str | None:
    """The last line of the recorded stack that names a file, as file:line."""
    stack = node.meta.get("stack_trace")
    if not stack:
        return None
    lines = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return None
    parts = lines[-1].split('"')
    number = lines[-1].split("line ")[-1].split(",")[0]
    return f"{parts[1]}:{number}" if len(parts) > 1 else None


_OF_SOMETHING = frozenset(f"aten.{name}.default" for name in ("amax", "amin", "max", "min"))


def emptiness_guards(graph: Graph) -> tuple[str, ...]:
    """PyTorch refuses the maximum of an empty tensor; a loop would return infinity."""
    specs = graph.specs()
    symbols: dict[str, None] = {}
    for node in graph.nodes:
        if node.op not in _OF_SOMETHING or not isinstance(node.args[0], Ref):
            continue
        spec = specs[node.args[0].name]
        assert spec is not None
        given = node.args[1] if len(node.args) > 1 else ()
        rank = len(spec.shape)  # a number has one element, whichever dimension is given
        dims = given if isinstance(given, tuple) and given and rank else range(rank)
        for position in dims:
            assert isinstance(position, int)
            symbols.update(dict.fromkeys(spec.shape[position].symbols))
    return tuple(f"({symbol} != 0)" for symbol in symbols)


def guard_texts(shape_env: ShapeEnv, converter: Converter) -> tuple[str, ...]:
    """The assumptions that the trace made about symbols, as Python expressions."""
    texts: dict[str, None] = {}
    for guard in shape_env.guards:
        expr = shape_env.simplify(guard.expr)
        text = converter_text(expr, converter)
        if text != "True":
            texts[f"({text})"] = None
    return tuple(texts)


def converter_text(expr: Any, converter: Converter) -> str:
    """A size or an assumption as a Python expression over our symbols."""
    names = {symbol: sympy.Symbol(name) for symbol, name in converter._symbols.items()}
    if not expr.free_symbols:
        return str(expr)
    if not expr.free_symbols <= set(names):
        raise inexpressible(expr)
    return str(PythonPrinter().doprint(expr.xreplace(names)))
