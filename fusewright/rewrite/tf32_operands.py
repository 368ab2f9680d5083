"""Operands of weight gradients that stay PyTorch's, rounded to TF32 where we chose channels-last.

    weight gradient(x, dy) = weight gradient(tf32(x), tf32(dy))     where TF32 is allowed

In channels-last, cuDNN cuts both operands to TF32 instead of rounding them: 2.7 times the error
(H200, docs/history.md). So the loops that lay them out round them to the nearest number.
`conv_tf32` is true where PyTorch's flags allow TF32 at that moment; else nothing is rounded.
Rounding keeps the sign and what is zero, so backward may compare a rounded value with zero instead
of the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fusewright.ir.graph import Graph, Node, Program, Ref, TensorSpec, contiguous_strides, validate
from fusewright.ir.operators import SCALAR_OPS
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.layouts import BACKWARD, FORWARD, is_channels_last

ALLOWED = "conv_tf32"
_ROUNDED = "round_tf32"
# With other numbers of channels cuDNN computes in float32, in either layout.
_CHANNELS = 8
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
    readers = {node.name for node in _changed(program.forward, eager.forward)}
    forward = _Rounding(program.forward, frozenset(saved.values()), frozenset(readers))
    alike = readers & {node.name for node in _changed(program.inference, eager.inference)}
    inference = _Rounding(program.inference, forward.read_by(alike), frozenset(alike))
    positions = frozenset(first + at for at in saved)
    done = frozenset(program.backward.inputs[at].name for at in saved)
    wanted = _operands(gradients) - done
    made = {node.name for node in program.backward.nodes if _is_loop(node)}
    made |= _loop_made(program, first) - done
    backward = _Rounding(program.backward, wanted & made, frozenset(n.name for n in gradients))
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


def _is_moved(node: Node, specs: Specs) -> bool:
    """Whether cuDNN gets channels-last: if the input or the weights have it, and not rows, too."""
    at = 1 if node.op == BACKWARD else 0
    x, weight = (specs[name] for name in _names(node.args[at : at + 2]))
    groups = node.args[9 if node.op == BACKWARD else 8]
    if x is None or weight is None or x.dtype != "float32" or groups != 1:
        return False
    if any(not each.is_static or each.factor % _CHANNELS for each in weight.shape[:2]):
        return False
    return any(
        is_channels_last(each) and each.strides != contiguous_strides(each.shape)
        for each in (x, weight)
    )


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


@dataclass
class _Rounding:
    """One graph being changed: `values` are rounded for those of `readers` that read them first."""

    graph: Graph
    values: frozenset[str]
    readers: frozenset[str]
    rounded: dict[str, Ref] = field(default_factory=dict)
    allowed: Ref | None = None

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
            builder.add(node.renamed(names))
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
