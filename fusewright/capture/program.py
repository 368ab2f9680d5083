"""From the two halves of a traced graph to a `Program`: conversion, labels and readable names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusewright.capture.call import Flattened
from fusewright.capture.convert import (
    Converter,
    InexpressibleForwardError,
    InexpressibleSizeError,
    emptiness_guards,
    guard_texts,
)
from fusewright.capture.naming import binding_names, distinct, renamed
from fusewright.errors import CaptureError
from fusewright.ir.graph import Binding, Graph, Program, Result, Symbol, validate


@dataclass(frozen=True)
class Halves:
    """The partitioned joint graph: both halves, what the inputs and forward outputs are."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    input_labels: tuple[Any, ...]
    output_labels: tuple[Any, ...]

    @property
    def binding_positions(self) -> Mapping[int, int]:
        """From the position of a tensor argument to the position among the forward inputs."""
        return {
            label.idx: position
            for position, label in enumerate(self.input_labels)
            if type(label).__name__ == "PlainAOTInput"
        }


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def make_program(
    halves: Halves,
    converter: Converter,
    symbols: tuple[Symbol, ...],
    shape_env: ShapeEnv,
    mode: str,
    flattened: Flattened,
    fakes: Sequence[Tensor],
) -> Program:
    try:
        forward = converter.graph(halves.forward)
    except InexpressibleSizeError as error:
        raise InexpressibleForwardError(*error.args) from error
    bindings = tuple(_binding(label, flattened, fakes) for label in halves.input_labels)
    n_outputs = len(halves.output_labels)
    results = [_result(label, halves) for label in halves.output_labels]
    plain = forward.outputs[:n_outputs]
    saved = tuple(output for output in forward.outputs[n_outputs:] if isinstance(output, str))
    backward, tangents = _backward(halves, converter, saved, results, len(bindings))
    if backward is not None:
        backward, used = converter.with_saved_constants(backward, len(saved))
        saved += used
    results += [Result("saved", index) for index in range(len(saved))]
    inference = converter.with_constants(Graph(forward.inputs, forward.nodes, plain).pruned())
    forward = converter.with_constants(Graph(forward.inputs, forward.nodes, (*plain, *saved)))
    for graph in (forward, inference, *((backward,) if backward else ())):
        validate(graph)
    program = Program(
        mode=mode,
        bindings=bindings + converter.constant_bindings,
        symbols=symbols,
        guards=guard_texts(shape_env, converter) + emptiness_guards(forward),
        forward=forward,
        results=tuple(results),
        backward=_with_gradient_slots(backward, len(converter.constant_bindings)),
        tangents=tangents,
        inference=inference,
        output_tree=flattened.output_tree,
        reach=_reach(tangents, results, bindings, flattened.depends),
        output_types=tuple(flattened.output_types.items()),
    )
    return _with_readable_names(program, flattened.model)


def _reach(
    tangents: Sequence[int],
    results: Sequence[Result],
    bindings: Sequence[Binding],
    depends: Sequence[frozenset[tuple[str, str]]],
) -> tuple[tuple[int, ...], ...]:
    """For each tangent, the positions of the bindings that its output depends on in eager."""
    behind = (depends[results[position].index] for position in tangents)
    return tuple(
        tuple(at for at, each in enumerate(bindings) if (each.kind, each.path) in found)
        for found in behind
    )


def _with_readable_names(program: Program, model: nn.Module) -> Program:
    """Inputs are called after the parameters and arguments they are."""
    graphs = [program.forward, program.inference]
    graphs += [program.backward] if program.backward else []
    taken = {node.name for graph in graphs for node in graph.nodes}
    taken |= {symbol.name for symbol in program.symbols}
    fresh = binding_names(program.bindings, model.forward, taken)
    names = {each.name: name for each, name in zip(program.forward.inputs, fresh, strict=True)}
    used = taken | set(fresh)
    if program.backward is not None:
        first = len(program.backward.inputs) - len(program.tangents)
        for each in program.backward.inputs[first:]:
            names[each.name] = distinct("grad_output", used)
    return replace(
        program,
        forward=renamed(program.forward, names),
        inference=renamed(program.inference, names),
        backward=renamed(program.backward, names) if program.backward else None,
    )


def _with_gradient_slots(backward: Graph | None, extra: int) -> Graph | None:
    """Constants are bindings too: they get no gradient, but their place in the list."""
    if backward is None:
        return None
    return Graph(backward.inputs, backward.nodes, backward.outputs + (None,) * extra)


def _binding(label: Any, flattened: Flattened, fakes: Sequence[Tensor]) -> Binding:
    match type(label).__name__:
        case "ParamAOTInput":
            path = label.target.removeprefix("model.")
            return Binding("parameter", path, flattened.trainable[path])
        case "BufferAOTInput":
            return Binding("buffer", label.target.removeprefix("model."), False)
        case "PlainAOTInput":
            return Binding("input", str(label.idx), fakes[label.idx].requires_grad)
    raise CaptureError(f"an input of kind {label!r} is not supported; simplify the arguments")


def _result(label: Any, halves: Halves) -> Result:
    match type(label).__name__:
        case "PlainAOTOutput":
            return Result("output", label.idx)
        case "InputMutationAOTOutput":
            return Result("mutation", halves.input_labels.index(label.mutated_input))
    raise CaptureError(f"an output of kind {label!r} is not supported; return plain tensors")


def _backward(
    halves: Halves,
    converter: Converter,
    saved: tuple[str, ...],
    results: Sequence[Result],
    n_bindings: int,
) -> tuple[Graph | None, tuple[int, ...]]:
    """The backward graph with its tangents told apart from the saved values by their labels."""
    if halves.backward is None:
        return None, ()
    graph = converter.graph(halves.backward)
    tangents = []
    for node in placeholders(halves.backward):
        label: Any = node.meta.get("desc")
        if type(label).__name__ == "TangentAOTInput":
            source: Any = label.output
            kind = type(source).__name__
            if kind != "PlainAOTOutput":
                raise CaptureError(
                    "a gradient flows through an argument that the model changes in place; "
                    "clone the argument first"
                )
            tangents.append(
                next(i for i, r in enumerate(results) if r == Result("output", source.idx))
            )
    outputs = graph.outputs
    assert len(outputs) == n_bindings, (len(outputs), n_bindings)
    expected = len(saved) + len(tangents)
    assert len(graph.inputs) == expected, (len(graph.inputs), expected)
    return graph, tuple(tangents)
