"""Channels-last for PyTorch's convolutions: the layout is chosen here, and its copies are loops.

    convolution(x, w) = plain(convolution(last(x), last(w))), where both only change the layout

A loop that computes an operand writes it in channels-last at once, unless it is an epilogue of our
own convolutions, which writes row by row. Loops that follow read a result through its strides; all
other readers get a copy in the layout that they expect. So the graph's outputs keep their strides,
while a chain of convolutions and loops stays in channels-last. Backward reads saved values in the
layout that forward left, so both graphs are changed together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusewright.ir.graph import (
    ONE,
    Arg,
    Dim,
    Graph,
    Node,
    Program,
    Ref,
    TensorSpec,
    product,
    validate,
)
from fusewright.ir.operators import SCALAR_OPS
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.lone_convolutions import lone_convolutions
from fusewright.rewrite.lower import main_device
from fusewright.rewrite.padding import PAD
from fusewright.rewrite.views import is_canonical_view

FORWARD = "aten.convolution.default"
BACKWARD = "aten.convolution_backward.default"
# Our own convolutions read any layout, unless they are marked to read rows.
CONVOLUTION, GRADIENT, ROW_BY_ROW = "fused_convolution", "weight_gradient", "row_by_row"
RANKS = (4, 5)
Output = str | Dim | None
# With few channels cuDNN has no tensor-core kernel that gains. Where TF32 is allowed it still
# computes in float32 (8 → 64 channels); channels-last must not be less exact than eager mode.
# float64 has no channels-last kernel at all.
FEWEST_CHANNELS = {"float32": 32, "float16": 8, "bfloat16": 8}
# Of input, weights and result. Below that, the copies' launches cost more than they save. (H200,
# 512 × 512 by 3 × 3 on 16 images of 7 × 7: cuDNN transposes weights in 14.8 of its 39.5 µs.)
LEAST_BYTES = 8 << 20


def channels_last_strides(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Channels are neighbours, then columns, rows, images."""
    strides = [ONE] * len(shape)
    running = ONE
    for position in (1, *range(len(shape) - 1, 1, -1), 0):
        strides[position] = running
        running = running * shape[position]
    return tuple(strides)


def is_channels_last(spec: TensorSpec) -> bool:
    """Whether a tensor is in channels-last; strides of dimensions of size one do not matter."""
    if len(spec.shape) not in RANKS:
        return False
    dims = zip(spec.shape, spec.strides, channels_last_strides(spec.shape), strict=True)
    return all(size == ONE or stride == wanted for size, stride, wanted in dims)


def with_channels_last(program: Program) -> Program:
    """The same program, with its larger convolutions in channels-last."""
    sizes = program.example_sizes
    inference = _Relayout(program.inference, sizes, left=lone_convolutions(program.inference)).run()
    if program.backward is None:
        forward = _Relayout(program.forward, sizes).run()
        return replace(program, forward=forward, inference=inference)
    first = sum(result.kind != "saved" for result in program.results)
    saved = range(first, len(program.forward.outputs))
    trial = _Relayout(program.forward, sizes, kept=frozenset(saved))
    trial.run()
    in_memory = trial.in_memory
    held = frozenset(i for i in saved if _name(program.forward.outputs[i]) in in_memory)
    wished = _wishes(program, sizes, first, held)
    kept = held | wished
    names = frozenset(_name(program.forward.outputs[i]) for i in wished)
    forward = _Relayout(program.forward, sizes, kept=kept, wished=names).run()
    backward = _relaid(program.backward, sizes, frozenset(i - first for i in kept)).run()
    return replace(program, forward=forward, inference=inference, backward=backward)


def _relaid(backward: Graph, sizes: Mapping[str, int], positions: frozenset[int]) -> _Relayout:
    """The backward graph; inputs at `positions` are in channels-last."""
    inputs = tuple(
        replace(each, spec=_last(each.spec)) if at in positions else each
        for at, each in enumerate(backward.inputs)
    )
    relaid = {each.name: each.spec for at, each in enumerate(backward.inputs) if at in positions}
    return _Relayout(replace(backward, inputs=inputs), sizes, relaid=relaid)


def _wishes(
    program: Program, sizes: Mapping[str, int], first: int, held: frozenset[int]
) -> frozenset[int]:
    """Saved values of loops that backward reads only next to gradients in channels-last."""
    assert program.backward is not None
    relayout = _relaid(program.backward, sizes, frozenset(i - first for i in held))
    made = {node.name: node for node in program.forward.nodes}
    fixed = frozenset(map(_name, program.forward.outputs[:first]))
    fixed |= _ends_of_convolutions(program.forward)
    found = set()
    for position in range(first, len(program.forward.outputs)):
        node = made.get(_name(program.forward.outputs[position]))
        free = position not in held and node is not None and node.name not in fixed
        if free and node is not None and _is_loop(node) and _can_relay(node.spec):
            beside = relayout.beside(program.backward.inputs[position - first].name)
            found.update([position] if beside == {True} else [])
    return frozenset(found)


def _last(spec: TensorSpec) -> TensorSpec:
    return replace(spec, strides=channels_last_strides(spec.shape))


def _can_relay(spec: TensorSpec | None) -> bool:
    return spec is not None and len(spec.shape) in RANKS and not is_channels_last(spec)


def _is_given_so(spec: TensorSpec | None) -> bool:
    """Whether the result of a channels-last convolution has other strides, if only for size one."""
    return spec is not None and len(spec.shape) in RANKS and spec != _last(spec)


def _is_loop(node: Node) -> bool:
    return node.op in SCALAR_OPS


def _moves(node: Node) -> bool:
    return is_canonical_view(node) or node.op == PAD


def _reads_any_layout(node: Node) -> bool:
    if node.op == CONVOLUTION:
        return not node.argument(ROW_BY_ROW)
    swept = node.op.startswith(("reduce_", "scan_"))
    return _is_loop(node) or swept or node.op in (GRADIENT, "getitem")


def _ends_of_convolutions(graph: Graph) -> frozenset[str]:
    """Values that loops compute from a fused convolution before any reduction."""
    specs = graph.specs()
    ends: set[str] = set()
    after: set[str] = set()  # values that need a whole result
    for node in graph.nodes:
        read = set(node.refs())
        whole = {name for name in read & ends if _shape(specs[name]) == _shape(node.spec)}
        if node.op == CONVOLUTION or (_is_loop(node) and whole and not read & after):
            ends.add(node.name)
        elif not (read.isdisjoint(ends) and read.isdisjoint(after)):
            after.add(node.name)
    return frozenset(ends)


def _name(arg: object) -> str:
    return arg.name if isinstance(arg, Ref) else arg if isinstance(arg, str) else ""


@dataclass(frozen=True)
class _Convolution:
    """Input, weight and result of the forward operator, for either operator."""

    x: TensorSpec
    weight: TensorSpec
    y: TensorSpec
    transposed: Arg
    groups: Arg

    @staticmethod
    def of(node: Node, specs: Mapping[str, TensorSpec | None]) -> _Convolution | None:
        if node.op == FORWARD:
            x, weight, y = specs[_name(node.args[0])], specs[_name(node.args[1])], node.spec
            rest = node.args[6], node.args[8]
        elif node.op == BACKWARD:
            y, x, weight = (specs[_name(arg)] for arg in node.args[:3])
            rest = node.args[7], node.args[9]
        else:
            return None
        if x is None or weight is None or y is None:
            return None
        return _Convolution(x, weight, y, *rest)

    def fits(self, sizes: Mapping[str, int], device: str) -> bool:
        """Whether cuDNN gains from channels-last because it need not transpose for itself.

        Of grouped convolutions, depthwise ones gain, up to five times (H200); others lose, up to 31
        times (PyTorch's own measurements).
        """
        x, weight, y = self.x, self.weight, self.y
        fewest = FEWEST_CHANNELS.get(x.dtype)
        return (
            len(x.shape) in RANKS
            and x.dtype == weight.dtype == y.dtype
            and x.device == weight.device == device
            and fewest is not None
            and (self._is_depthwise(fewest) or self._has_channels(sizes, fewest))
            and ONE not in (product(x.shape[2:]), product(y.shape[2:]))
            and sum(each.bytes_at(sizes) for each in (x, weight, y)) >= LEAST_BYTES
        )

    def _has_channels(self, sizes: Mapping[str, int], fewest: int) -> bool:
        return self.groups == 1 and min(n.at(sizes) for n in self.weight.shape[:2]) >= fewest

    def _is_depthwise(self, fewest: int) -> bool:
        groups = self.groups
        return (
            isinstance(groups, int)
            and groups >= fewest
            and {self.x.shape[1], self.y.shape[1]} == {Dim(groups)}
            and not self.transposed
            and len(self.x.shape) == 4
        )

    @property
    def is_matmul(self) -> bool:
        """Whether it is a matmul of the weights and an image as stored, with rows of 16 bytes."""
        taps, pixels = product(self.weight.shape[2:]), product(self.x.shape[2:])
        plain = taps == ONE and self.x.shape[2:] == self.y.shape[2:]
        return plain and pixels.factor % 4 == 0


@dataclass
class _Relayout:
    """One graph being changed: `kept` outputs stay in channels-last, `wished` values are put there,
    and convolutions that are `left` stay as they are. `relaid` maps the values in channels-last to
    their old specs; at first, these are inputs."""

    graph: Graph
    sizes: Mapping[str, int]
    kept: frozenset[int] = frozenset()
    wished: frozenset[str] = frozenset()
    convolutions: frozenset[str] = frozenset()
    operands: frozenset[str] = frozenset()
    copies: dict[str, Ref] = field(default_factory=dict)
    relaid: dict[str, TensorSpec] = field(default_factory=dict)
    restored: dict[str, Ref] = field(default_factory=dict)
    inherited: set[str] = field(default_factory=set)
    weights: frozenset[str] = frozenset()
    convolution_ends: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.builder = Builder(self.graph.inputs)
        self.made = {node.name: node for node in self.graph.nodes}
        others = (each for at, each in enumerate(self.graph.outputs) if at not in self.kept)
        self.given = frozenset(map(_name, others))
        specs, device = self.graph.specs(), main_device(self.graph)
        found: dict[str, Node] = {}
        already = {n for n, spec in specs.items() if spec is not None and is_channels_last(spec)}
        last = already | self.relaid.keys()
        for node in self.graph.nodes:
            parts = _Convolution.of(node, specs)
            if parts is not None and node.name not in self.left and parts.fits(self.sizes, device):
                # A matmul is as fast in either layout, so it takes its images as they are.
                if not parts.is_matmul or last.intersection(_operands(node)[:-1]):
                    found[node.name] = node
                    last.add(node.name)
            elif _is_loop(node) or node.op == "getitem":
                whole = {n for n in node.refs() if _shape(specs[n]) == _shape(node.spec)}
                given = node.refs() if node.op == "getitem" else whole
                last.update([node.name] if last.intersection(given) else [])
        self.convolutions = frozenset(found)
        self.operands = frozenset(n for node in found.values() for n in _operands(node))
        self.weights = frozenset(_operands(node)[-1] for node in found.values())
        self.convolution_ends = _ends_of_convolutions(self.graph)

    @property
    def in_memory(self) -> frozenset[str]:
        """The values of the old graph that are in memory in channels-last in the new one. Weights
        are so small that backward copies its own."""
        return frozenset((*self.copies, *self.relaid)) - self.weights - self.inherited

    def run(self) -> Graph:
        if not self.convolutions and not self.wished and not self.relaid:
            return self.graph
        for node in self.graph.nodes:
            self._add(node)
        last = self.in_memory | self.wished
        outputs = tuple(self._output(at, each, last) for at, each in enumerate(self.graph.outputs))
        made = self.builder.graph(outputs)
        validate(made)
        return made

    def _add(self, node: Node) -> None:
        if node.name in self.convolutions:
            self._convolution(node)
        elif self._is_relaid(node) or self._inherits(node):
            assert node.spec is not None
            self.relaid[node.name] = node.spec
            self.builder.add(replace(node, spec=_last(node.spec)))
        elif _reads_any_layout(node):
            self.builder.add(node)
        else:
            names = {name: self._plain(name).name for name in node.refs()}
            self.builder.add(node.renamed(names))

    def _is_relaid(self, node: Node) -> bool:
        """Values that loops compute for convolutions, and results of a backward convolution."""
        if node.op == "getitem":
            return _name(node.args[0]) in self.convolutions and _is_given_so(node.spec)
        if not _can_relay(node.spec):
            return False
        wanted = node.name in self.operands or node.name in self.wished
        return _is_loop(node) and wanted and node.name not in self.convolution_ends

    def _inherits(self, node: Node) -> bool:
        """Whether a loop's value is in channels-last because all its operands are."""
        if not _is_loop(node) or not _can_relay(node.spec) or node.name in self.given:
            return False
        specs = [self.builder.spec(name) for name in node.refs()]
        whole = [spec for spec in specs if spec.shape == _shape(node.spec)]
        found = bool(whole) and all(map(is_channels_last, whole))
        self.inherited.update([node.name] if found else [])
        return found

    def _convolution(self, node: Node) -> None:
        names = {name: self._in_channels_last(name, node).name for name in _operands(node)}
        if node.spec is not None and _is_given_so(node.spec):
            self.relaid[node.name] = node.spec
            node = replace(node, spec=_last(node.spec))
        self.builder.add(node.renamed(names))

    def _in_channels_last(self, name: str, reader: Node) -> Ref:
        spec = self.builder.spec(name)
        if is_channels_last(spec):
            return Ref(name)
        if name not in self.copies:
            copy = Node(f"{name}_last", "cast", (Ref(name),), (), _last(spec), reader.source)
            self.copies[name] = self.builder.add(copy)
        return self.copies[name]

    def _plain(self, name: str) -> Ref:
        """A value in its old layout."""
        if name not in self.relaid:
            return Ref(name)
        if name not in self.restored:
            copy = Node(f"{name}_plain", "cast", (Ref(name),), (), self.relaid[name])
            self.restored[name] = self.builder.add(copy)
        return self.restored[name]

    def _output(self, at: int, output: Output, last: frozenset[str]) -> Output:
        if not isinstance(output, str):
            return output
        if at in self.kept and output in last:
            return output if output in self.relaid else self.copies[output].name
        return self._plain(output).name

    def beside(self, name: str) -> set[bool]:
        """For each tensor in memory that a loop reads with this input: is it in channels-last?"""
        made, specs = self.made, self.graph.specs()
        seen, frontier = self._meeting(name)
        through, found = len(seen) > 1, set[bool]()
        while frontier:
            value = frontier.pop()
            spec, node = specs[value], made.get(value)
            moved = through and node is not None and _moves(node)
            alike = moved or _shape(spec) == _shape(specs[name])
            if value in seen or spec is None or not alike:
                continue
            seen.add(value)
            if node is not None and (moved or _is_loop(node)):
                frontier += node.refs()
            else:
                found.add(is_channels_last(spec) or (node is not None and self._is_relaid(node)))
        return found

    def _meeting(self, name: str) -> tuple[set[str], list[str]]:
        """The values that loops read together with this input. Pool offsets are bytes, which
        backward moves and compares with numbers before it uses gradients: they are followed through
        these steps, and the results come first."""
        users, specs = self.graph.users(), self.graph.specs()
        spec = specs[name]
        assert spec is not None
        least, are_offsets = spec.numel.at(self.sizes), spec.dtype == "uint8"
        same, met = [name], list[str]()
        for each in same:
            for user in users[each]:
                others = [specs[other] for other in user.refs() if other != each]
                alone = all(it is not None and it.numel.at(self.sizes) < least for it in others)
                if are_offsets and (_moves(user) or (_is_loop(user) and alone)):
                    same.append(user.name)
                elif _is_loop(user):
                    met += user.refs()
        return set(same), met


def _shape(spec: TensorSpec | None) -> tuple[Dim, ...]:
    return spec.shape if spec is not None else ()


def _operands(node: Node) -> tuple[str, ...]:
    """Input and weight; in backward, the result's gradient, input and weight."""
    return tuple(_name(arg) for arg in node.args[: 2 if node.op == FORWARD else 3])
