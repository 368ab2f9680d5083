"""Graphs that Dynamo hands to a back-end, by way of AOTAutograd, in our graph language.

Dynamo guards a graph and makes sizes symbolic. AOTAutograd takes care of autograd, aliases and
changes in place. What is left is a function from a flat list of tensors and sizes to another list.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.printers import PythonPrinter

from fusewright.capture.convert import MAX_LITERAL, Converter, inexpressible
from fusewright.capture.decompositions import decomposition_table, kept_whole
from fusewright.capture.effects import checks_kept, tokens_passed_on
from fusewright.capture.losses import with_class_losses
from fusewright.capture.program import placeholders
from fusewright.capture.repeats import copying
from fusewright.capture.tangents import laid_out_apart
from fusewright.capture.trace import ONE_AT_A_TIME, backward_without_autocast, split
from fusewright.errors import CaptureError
from fusewright.ir.graph import Dim, Graph, Input, Node, validate
from fusewright.runtime.guard import _fw_driven

# A compiled graph takes a list, which it may empty, and returns its results.
Run = Callable[[list[Any]], Sequence[Any]]
CompileGraph = Callable[[str, fx.GraphModule], Run]
# The variable that holds the arguments of a call, for the texts of sizes.
ARGUMENTS = "fw_args"
_OTHER = "fusewright_other_direction"


@dataclass(frozen=True)
class Size:
    """A symbol of a graph, with its value in the example. `text` computes it from the arguments and
    earlier symbols; it is empty if the symbol is an argument."""

    name: str
    example: int
    text: str = ""


@dataclass(frozen=True)
class FlatGraph:
    """A graph and its call: for each argument the input or symbol that it is, or an empty name.

    `constants` are the last inputs of the graph, which each call gets. `passed` are results that
    are arguments of other kinds, such as the device mesh of a distributed tensor: the positions of
    both. The graph returns None in their place.
    """

    graph: Graph
    arguments: tuple[str, ...]
    sizes: tuple[Size, ...]
    constants: tuple[torch.Tensor, ...]
    passed: tuple[tuple[int, int], ...] = ()


def back_end(compile_graph: CompileGraph) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
    """A function for `torch.compile(backend=…)`. `compile_graph` is called for each graph with its
    kind: forward, backward or inference."""
    if torch.__version__ < "2.12":
        # A short cut that misses the first tensor of an empty table. Later versions leave it off.
        torch._dynamo.config.use_recursive_dict_tags_for_guards = False

    def compiler(kind: str) -> Callable[..., Any]:
        def compiled(module: fx.GraphModule, _: Sequence[Any]) -> Any:
            with _disable_current_modes():  # of the trace, which would make our tensors fakes
                run = compile_graph(kind, module)
            return _boxed(partial(_fw_driven, run) if kind == "backward" else run)

        return compiled

    aot = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=_partition,
        decompositions=copying(decomposition_table()),
    )

    def compile_module(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        fakes = detect_fake_mode(inputs)
        # Tensors that the model makes in forward are constants of the graph.
        allowed = patch.object(fakes, "allow_non_fake_inputs", True) if fakes else nullcontext()
        plain = backward_without_autocast()
        with ONE_AT_A_TIME, kept_whole(), checks_kept(), laid_out_apart(), plain, allowed:
            return aot(module, inputs)

    return compile_module


def as_it_is(module: fx.GraphModule) -> Run:
    """The graph run by PyTorch, operator by operator."""
    return lambda arguments: module.forward(*arguments)


def _boxed(run: Run) -> Run:
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _partition(
    joint: fx.GraphModule, inputs: Sequence[Any], **others: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    with_class_losses(joint)
    forward, backward = split(joint, inputs, **others)
    forward.meta[_OTHER], backward.meta[_OTHER] = backward, forward
    return forward, backward


def other_direction(module: fx.GraphModule) -> fx.GraphModule | None:
    """The backward graph of a forward graph, or the other way round."""
    found: fx.GraphModule | None = module.meta.get(_OTHER)
    return found


def flat_graph(module: fx.GraphModule) -> FlatGraph:
    """The graph in our language. CaptureError if it has what our language lacks."""
    converter = _FlatConverter(module)
    graph = converter.graph(module)
    graph = replace(graph, inputs=(*graph.inputs, *converter.constants))
    validate(graph)
    tensors = tuple(converter.constants.values())
    passed = tuple(converter.passed(module))
    return FlatGraph(graph, converter.arguments, tuple(converter.sizes), tensors, passed)


class _FlatConverter(Converter):
    """Every size has a name: an argument's, a dimension's of one, or that of a formula."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(nn.Module(), {})
        self._tokens = tokens_passed_on(module)
        self.sizes: list[Size] = []
        self.constants: dict[Input, torch.Tensor] = {}
        names = {node.name for node in module.graph.nodes}
        self._fresh = (name for name in map("s{}".format, count()) if name not in names)
        given = placeholders(module)
        self.arguments = tuple(self._argument(node) for node in given)
        names_in_order = zip(given, self.arguments, strict=True)
        self._others = {node: at for at, (node, name) in enumerate(names_in_order) if not name}
        for at, node in enumerate(given):
            self._dimensions(at, node.meta.get("val"))

    def _argument(self, node: fx.Node) -> str:
        """The name of a tensor or size; empty for a token, or an argument that is neither."""
        value = node.meta.get("val")
        if node in self._tokens:
            return ""
        if isinstance(value, torch.Tensor):
            if value.is_neg() or value.is_conj():  # Dynamo guards both
                raise CaptureError(f"{node.name} is a lazily negated or conjugated view")
            return node.name
        if not isinstance(value, torch.SymInt):
            return ""
        return self._sized(value.node.expr, value.node.hint)

    def passed(self, module: fx.GraphModule) -> Iterator[tuple[int, int]]:
        """The results that are arguments of other kinds."""
        (results,) = module.graph.output_node().args
        for at, node in enumerate(results if isinstance(results, list | tuple) else [results]):
            if isinstance(node, fx.Node) and node in self._others:
                yield at, self._others[node]

    def _output(self, item: Any) -> str | Dim | None:
        other = isinstance(item, fx.Node) and item in self._others
        return None if other else super()._output(item)

    def _dimensions(self, at: int, value: Any) -> None:
        """Name the sizes of a tensor that no argument gives."""
        for position, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            expr = size.node.expr if isinstance(size, torch.SymInt) else None
            if expr is not None and expr.is_Symbol and expr not in self._symbols:
                self._sized(expr, size.node.hint, f"{ARGUMENTS}[{at}].shape[{position}]")

    def _sized(self, expr: Any, example: Any, text: str = "") -> str:
        if example is None:
            raise inexpressible(expr)
        name = next(self._fresh)
        self.sizes.append(Size(name, int(example), text))
        if expr.is_Symbol:
            self._symbols.setdefault(expr, name)
        self._sizes.setdefault(expr, Dim(1, (name,)))
        return name

    def _other_size(self, base: Any, power: Any) -> str:
        """A new symbol for a factor, computed before the graph runs."""
        expr = base**power
        if expr in self._sizes:
            (name,) = self._sizes[expr].symbols
            return name
        if not expr.is_integer or not expr.free_symbols <= set(self._symbols):
            raise inexpressible(expr)
        names = {symbol: sympy.Symbol(name, integer=True) for symbol, name in self._symbols.items()}
        text = PythonPrinter().doprint(expr.xreplace(names))
        known = {each.name: each.example for each in self.sizes}
        return self._sized(expr, eval(text, {"math": math}, known), text)  # PyTorch's own text

    def _attribute(self, module: fx.GraphModule, node: fx.Node) -> list[Node]:
        """A tensor that the graph holds is one more input, which each call gets."""
        value: Any = operator.attrgetter(str(node.target))(module)
        if not isinstance(value, torch.Tensor) or value.numel() <= MAX_LITERAL:
            return super()._attribute(module, node)
        self.constants[Input(node.name, self.spec(value))] = value
        return []
