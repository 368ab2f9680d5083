"""Operands of weight gradients that stay PyTorch's, rounded to TF32 where we chose channels-last.

    weight gradient(x, dy) = weight gradient(tf32(x), tf32(dy))     where TF32 is allowed

In channels-last, cuDNN cuts both operands to TF32 instead of rounding them: 2.7 times the error
(H200, docs/history.md). So the loops that lay them out round them to the nearest number.
`conv_tf32` is true where PyTorch's flags allow TF32 at that moment; else nothing is rounded.

Other convolutions that read an operand get the rounded one, too: with TF32 allowed they round it
themselves, PyTorch's as well as ours, and the loop writes one tensor instead of two. Rounding keeps
the sign and what is zero, so backward may compare a rounded value with zero instead of the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fusewright.ir.graph import Graph, Node, Program, Ref, TensorSpec, contiguous_strides, validate
from fusewright.ir.operators import SCALAR_OPS
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.layouts import (
    BACKWARD,
    CONVOLUTION,
    FORWARD,
    ROW_BY_ROW,
    is_channels_last,
)

ALLOWED = "conv_tf32"
_ROUNDED = "round_tf32"
# With other numbers of channels cuDNN computes in float32, in either layout.
_CHANNELS = 8
_GROUPS = {FORWARD: 8, BACKWARD: 9, CONVOLUTION: 5}  # which argument it is
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
Specs = Mapping[str, TensorSpec | None]


def with_rounded_operands(program: Program, eager: Program) -> Program:
    """`program` with rounded operands; `eager` is the same before layouts were chosen."""
    if program.backward is None or eager.backward is None:
        return program
    changed = _changed(program.backward, eager.backward)
    gradients = [node for node in changed if node.op == BACKWARD and _gives_weights(node)]
    if not gradients:
        return program
    first = sum(result.kind != "saved" for result in program.results)
    saved = _saved(program, gradients, first)
    readers = _rounding(program.forward)
    forward = _Rounding(program.forward, frozenset(saved.values()), readers)
    alike = readers & _rounding(program.inference)
    inference = _Rounding(program.inference, forward.read_by(alike), alike)
    positions = frozenset(first + at for at in saved)
    done = frozenset(program.backward.inputs[at].name for at in saved)
    wanted = _operands(gradients) - done
    made = {node.name for node in program.backward.nodes if _is_loop(node)}
    made |= _loop_made(program, first) - done
    backward = _Rounding(program.backward, wanted & made, _rounding(program.backward))
    backward.plain = _only_summed(backward, eager.backward)
    return replace(
        program,
        forward=forward.run(positions),
        inference=inference.run(frozenset()),
        backward=backward.run(frozenset()),
    )


def _changed(graph: Graph, eager: Graph) -> list[Node]:
    """The convolutions that read channels-last although eager mode's do not."""
    before, after = eager.specs(), graph.specs()
    old = {node.name: node for node in eager.nodes if node.op in (FORWARD, BACKWARD)}
    pairs = [(node, old.get(node.name)) for node in graph.nodes if node.op in (FORWARD, BACKWARD)]
    return [
        node
        for node, other in pairs
        if other is not None and _is_moved(node, after) and not _is_moved(other, before)
    ]


def _rounding(graph: Graph) -> frozenset[str]:
    """The convolutions that round their operands to TF32 where it is allowed."""
    specs = graph.specs()
    found = [node for node in graph.nodes if node.op in (FORWARD, BACKWARD)]
    # Direct convolutions of ours compute in float32.
    found += [n for n in graph.nodes if n.op == CONVOLUTION and not n.argument(ROW_BY_ROW)]
    return frozenset(node.name for node in found if _rounds(*_operand_specs(node, specs), node))


def _is_moved(node: Node, specs: Specs) -> bool:
    """Whether cuDNN gets channels-last: if the input or the weights have it, and not rows, too."""
    x, weight = _operand_specs(node, specs)
    return _rounds(x, weight, node) and any(
        is_channels_last(each) and each.strides != contiguous_strides(each.shape)
        for each in (x, weight)
        if each is not None
    )


def _operand_specs(node: Node, specs: Specs) -> tuple[TensorSpec | None, TensorSpec | None]:
    """Of the input and the weights."""
    at = 1 if node.op == BACKWARD else 0
    x, weight = (specs[name] for name in _names(node.args[at : at + 2]))
    return x, weight


def _rounds(x: TensorSpec | None, weight: TensorSpec | None, node: Node) -> bool:
    groups = node.args[_GROUPS[node.op]]
    if x is None or weight is None or x.dtype != "float32" or groups != 1:
        return False
    return all(each.is_static and not each.factor % _CHANNELS for each in weight.shape[:2])


def _names(args: Iterable[object]) -> list[str]:
    return [each.name for each in args if isinstance(each, Ref)]


def _gives_weights(node: Node) -> bool:
    mask = node.args[-1]
    return isinstance(mask, tuple) and bool(mask[1])


def _operands(gradients: Iterable[Node]) -> frozenset[str]:
    """The gradient of the result, and the input, of each."""
    return frozenset(name for node in gradients for name in _names(node.args[:2]))


def _is_loop(node: Node) -> bool:
    return node.op in SCALAR_OPS


def _loop_made(program: Program, first: int) -> set[str]:
    """Backward's names of the saved values that loops of forward compute."""
    assert program.backward is not None
    loops = {node.name for node in program.forward.nodes if _is_loop(node)}
    saved = zip(program.forward.outputs[first:], program.backward.inputs, strict=False)
    return {each.name for output, each in saved if output in loops}


def _saved(program: Program, gradients: list[Node], first: int) -> dict[int, str]:
    """Saved values that forward may round instead: nothing but weight gradients reads them, and
    comparisons with zero. Their positions among the saved ones, and forward's names."""
    assert program.backward is not None
    users, found = program.backward.users(), dict[int, str]()
    loops = _loop_made(program, first)
    reading = {node.name: _names(node.args[1:2]) for node in gradients}
    given_on = {each for each in program.backward.outputs if isinstance(each, str)}
    for at, output in enumerate(program.forward.outputs[first:]):
        name = program.backward.inputs[at].name
        readers = users[name]
        read = any(reading.get(each.name) == [name] for each in readers)
        fits = all(reading.get(each.name) == [name] or _asks_zero(each) for each in readers)
        once = all(_names(each.args).count(name) == 1 for each in readers)
        if isinstance(output, str) and name in loops - given_on and read and fits and once:
            found[at] = output
    return found


def _asks_zero(node: Node) -> bool:
    others = [each for each in node.args if not isinstance(each, Ref)]
    zero = [type(each) in (int, float) and each == 0 for each in others]
    return node.op in _COMPARISONS and zero == [True]


def _only_summed(rounding: _Rounding, eager: Graph) -> dict[str, TensorSpec]:
    """Eager mode's layout of the values that only sums still read without rounding: a loop that
    writes one tensor channels-last and sums over channels need not write a second one so."""
    graph, users, before = rounding.graph, rounding.graph.users(), eager.specs()
    found: dict[str, TensorSpec] = {}
    for name in rounding.values.difference(each for each in graph.outputs if isinstance(each, str)):
        others = [node for node in users[name] if node.name not in rounding.readers]
        spec = before.get(name)
        if spec is not None and others and all(node.op == "reduce_sum" for node in others):
            found[name] = spec
    return found


@dataclass
class _Rounding:
    """One graph being changed: `values` are rounded for those of `readers` that read them first,
    and those in `plain` are themselves laid out so."""

    graph: Graph
    values: frozenset[str]
    readers: frozenset[str]
    rounded: dict[str, Ref] = field(default_factory=dict)
    allowed: Ref | None = None
    plain: Mapping[str, TensorSpec] = field(default_factory=dict)

    def read_by(self, names: Iterable[str]) -> frozenset[str]:
        """The values that these readers read."""
        wanted = frozenset(names)
        found = (_images(node) for node in self.graph.nodes if node.name in wanted)
        return frozenset(name for each in found for name in each) & self.values

    def run(self, outputs: frozenset[int]) -> Graph:
        """The new graph; at these positions of its outputs are rounded values."""
        if not self.values:
            return self.graph
        builder = Builder(self.graph.inputs)
        for each in self.graph.inputs:
            if each.name in self.values:
                self._round(builder, Node(each.name, "", (), (), each.spec))
        for node in self.graph.nodes:
            images = _images(node) if node.name in self.readers else ()
            names = {n: self.rounded[n].name for n in images if n in self.rounded}
            spec = self.plain.get(node.name, node.spec)
            builder.add(replace(node.renamed(names), spec=spec))
            if node.name in self.values:
                self._round(builder, node)
        made = builder.graph(
            tuple(
                self.rounded[each].name if at in outputs and isinstance(each, str) else each
                for at, each in enumerate(self.graph.outputs)
            )
        )
        validate(made)
        return made

    def _round(self, builder: Builder, node: Node) -> None:
        spec, value = node.spec, Ref(node.name)
        assert spec is not None
        flag = TensorSpec("bool", (), (), spec.device)
        if self.allowed is None:
            self.allowed = builder.add(Node(ALLOWED, ALLOWED, (), (), flag, node.source))
        near = Node(f"{node.name}_near", _ROUNDED, (value,), (), spec, node.source)
        args = (self.allowed, builder.add(near), value)
        chosen = Node(f"{node.name}_tf32", "where", args, (), spec, node.source)
        self.rounded[node.name] = builder.add(chosen)


def _images(node: Node) -> tuple[str, ...]:
    """What a convolution reads but its weights; of gradients the result's gradient, too."""
    return tuple(_names(node.args[: 2 if node.op == BACKWARD else 1]))
