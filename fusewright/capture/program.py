"""From the two graphs of a partition to a `Program`: conversion, labels and readable names."""

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
    converter_text,
    emptiness_guards,
    guard_texts,
)
from fusewright.capture.naming import binding_names, distinct, renamed
from fusewright.capture.tree import completed, held_text, input_text, size_text
from fusewright.errors import CaptureError
from fusewright.ir.graph import Binding, ForwardOutput, Graph, Program, Symbol, validate


class UndifferentiableError(CaptureError):
    """A gradient that we cannot express."""


@dataclass(frozen=True)
class Partition:
    """The partitioned joint graph, with labels of the inputs and of the forward outputs."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    input_labels: tuple[Any, ...]
    output_labels: tuple[Any, ...]

    @property
    def binding_positions(self) -> Mapping[int, int]:
        """From the position of a tensor argument to its position among the forward inputs."""
        return {
            label.idx: position
            for position, label in enumerate(self.input_labels)
            if type(label).__name__ == "PlainAOTInput"
        }


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def make_program(
    partition: Partition,
    converter: Converter,
    symbols: tuple[Symbol, ...],
    shape_env: ShapeEnv,
    mode: str,
    flattened: Flattened,
    fakes: Sequence[Tensor],
) -> Program:
    try:
        forward = converter.graph(partition.forward)
    except InexpressibleSizeError as error:
        raise InexpressibleForwardError(*error.args) from error
    bindings = tuple(_binding(label, flattened, fakes) for label in partition.input_labels)
    n_outputs = len(partition.output_labels)
    results = [_result(label, partition) for label in partition.output_labels]
    plain = forward.outputs[:n_outputs]
    saved = tuple(output for output in forward.outputs[n_outputs:] if isinstance(output, str))
    backward, tangents = _backward(partition, converter, saved, results, len(bindings))
    if backward is not None:
        backward, used = converter.with_saved_constants(backward, len(saved))
        saved += used
    results += [ForwardOutput("saved", index) for index in range(len(saved))]
    inference = converter.with_constants(Graph(forward.inputs, forward.nodes, plain).pruned())
    forward = converter.with_constants(Graph(forward.inputs, forward.nodes, (*plain, *saved)))
    for graph in (forward, inference, *((backward,) if backward else ())):
        validate(graph)
    states, places = flattened.states, _places(flattened, partition, bindings)
    meant = {text: f"tensors[{at}]" for text, at in places.items()}
    meant |= _size_texts(flattened, shape_env, converter)
    program = Program(
        mode=mode,
        bindings=bindings + converter.constant_bindings,
        symbols=symbols,
        guards=guard_texts(shape_env, converter) + emptiness_guards(forward),
        forward=forward,
        results=tuple(results),
        backward=backward,
        tangents=tangents,
        inference=inference,
        output_tree=completed(flattened.output_tree, meant),
        returned=flattened.returned,
        attached=tuple(sorted({places[each] for each in flattened.attached})),
        reach=_reach(tangents, results, bindings, flattened.depends),
        output_types=tuple(flattened.output_types.items()),
        effects=tuple(states.effects),
        held=states.held,
    )
    return _with_readable_names(program, flattened.model)


def _places(
    flattened: Flattened, partition: Partition, bindings: Sequence[Binding]
) -> dict[str, int]:
    """From the text that stands for a tensor to its position among the bindings."""
    named = {(each.kind, each.path): at for at, each in enumerate(bindings)}
    places = {input_text(at): place for at, place in partition.binding_positions.items()}
    held = {held_text(at): key for at, key in enumerate(flattened.held)}
    return places | {text: named[key] for text, key in held.items() if key in named}


def _size_texts(flattened: Flattened, shape_env: ShapeEnv, converter: Converter) -> dict[str, str]:
    """The symbolic sizes of views in the result, as Python expressions."""
    try:
        return {
            size_text(at): converter_text(shape_env.simplify(each.node.expr), converter)
            for at, each in enumerate(flattened.sizes)
        }
    except InexpressibleSizeError as error:
        raise InexpressibleForwardError(*error.args) from error


def _reach(
    tangents: Sequence[int],
    results: Sequence[ForwardOutput],
    bindings: Sequence[Binding],
    depends: Sequence[frozenset[tuple[str, str]]],
) -> tuple[tuple[int, ...], ...]:
    """For each tangent, the positions of the bindings that its output depends on in eager mode."""
    behind = (depends[results[position].index] for position in tangents)
    return tuple(
        tuple(at for at, each in enumerate(bindings) if (each.kind, each.path) in found)
        for found in behind
    )


def _with_readable_names(program: Program, model: nn.Module) -> Program:
    """Name inputs after the parameters and arguments that they are."""
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


def _binding(label: Any, flattened: Flattened, fakes: Sequence[Tensor]) -> Binding:
    match type(label).__name__:
        case "ParamAOTInput":
            path = label.target.removeprefix("model.")
            return Binding("parameter", path, flattened.trainable[path])
        case "BufferAOTInput":
            return Binding("buffer", label.target.removeprefix("model."), False)
        case "PlainAOTInput":
            return Binding(*flattened.binding(label.idx), fakes[label.idx].requires_grad)
    raise CaptureError(f"an input of kind {label!r} is not supported; simplify the arguments")


def _result(label: Any, partition: Partition) -> ForwardOutput:
    match type(label).__name__:
        case "PlainAOTOutput":
            return ForwardOutput("output", label.idx)
        case "InputMutationAOTOutput":
            return ForwardOutput("mutation", partition.input_labels.index(label.mutated_input))
    raise CaptureError(f"an output of kind {label!r} is not supported; return plain tensors")


def _backward(
    partition: Partition,
    converter: Converter,
    saved: tuple[str, ...],
    results: Sequence[ForwardOutput],
    n_bindings: int,
) -> tuple[Graph | None, tuple[int, ...]]:
    """The backward graph, and which outputs its tangents belong to, by their labels."""
    if partition.backward is None:
        return None, ()
    graph = converter.graph(partition.backward)
    tangents = []
    for node in placeholders(partition.backward):
        label: Any = node.meta.get("desc")
        if type(label).__name__ == "TangentAOTInput":
            if type(label.output).__name__ != "PlainAOTOutput":
                raise UndifferentiableError(
                    "a gradient flows through an argument that the model changes in place; "
                    "clone the argument first"
                )
            tangents.append(results.index(ForwardOutput("output", label.output.idx)))
    assert len(graph.outputs) == n_bindings, (len(graph.outputs), n_bindings)
    expected = len(saved) + len(tangents)
    assert len(graph.inputs) == expected, (len(graph.inputs), expected)
    # Constants are bindings, too: they have no gradient, but a position in the list.
    none = (None,) * len(converter.constant_bindings)
    return replace(graph, outputs=graph.outputs + none), tuple(tangents)
