"""Convolutions in channels-last: the layout is chosen here, its copies are loops like all others.

    convolution(x, w) = plain(convolution(last(x), last(w)))

`last` and `plain` change no value, only where it lies. An operand that a loop computes is written
in channels-last at once, but for what a convolution of ours ends in: that goes row by row. A result
is read through its strides by the loops that follow; everybody else is given a copy in the layout
he expects. So the graph's outputs keep their strides, while a chain of convolutions and loops stays
in channels-last. What backward is given lies in memory as forward left it: both graphs are told.
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
from fusewright.rewrite.lower import main_device
from fusewright.rewrite.padding import PAD
from fusewright.rewrite.views import is_canonical_view

FORWARD = "aten.convolution.default"
BACKWARD = "aten.convolution_backward.default"
# Convolutions of ours (windows.py) read any layout, but for those that are told to read rows.
WINDOW, GRADIENT, ROW_BY_ROW = "window", "window_gradient", "row_by_row"
RANKS = (4, 5)
# With few channels cuDNN has no tensor-core kernel to gain, and takes float32 at its word where
# TF32 is allowed (8 → 64 channels): in channels-last it must not become less exact than eager.
# float64 has no channels-last kernel at all.
FEWEST_CHANNELS = {"float32": 32, "float16": 8, "bfloat16": 8}
# Of input, weights and result: below that, what is saved is less than launching the copies costs.
# (H200, 512 × 512 by 3 × 3 on 16 images of 7 × 7: cuDNN turns the weights in 14.8 of its 39.5 µs.)
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
    """Whether a tensor lies so already; the stride of a dimension of size one says nothing."""
    if len(spec.shape) not in RANKS:
        return False
    places = zip(spec.shape, spec.strides, channels_last_strides(spec.shape), strict=True)
    return all(size == ONE or stride == wanted for size, stride, wanted in places)


def with_channels_last(program: Program) -> Program:
    """The same program, its larger convolutions in channels-last."""
    sizes = program.example_sizes
    inference = _Turning(program.inference, sizes).run()
    if program.backward is None:
        forward = _Turning(program.forward, sizes).run()
        return replace(program, forward=forward, inference=inference)
    first = sum(result.kind != "saved" for result in program.results)
    saved = range(first, len(program.forward.outputs))
    trial = _Turning(program.forward, sizes, kept=frozenset(saved))
    trial.run()
    held = frozenset(i for i in saved if _name(program.forward.outputs[i]) in trial.in_memory)
    wished = _wishes(program, sizes, first, held)
    kept = held | wished
    names = frozenset(_name(program.forward.outputs[i]) for i in wished)
    forward = _Turning(program.forward, sizes, kept=kept, wished=names).run()
    backward = _relaid(program.backward, sizes, frozenset(i - first for i in kept)).run()
    return replace(program, forward=forward, inference=inference, backward=backward)


def _relaid(backward: Graph, sizes: Mapping[str, int], positions: frozenset[int]) -> _Turning:
    """The backward graph, told which of its inputs lie in channels-last."""
    inputs = tuple(
        replace(each, spec=_last(each.spec)) if at in positions else each
        for at, each in enumerate(backward.inputs)
    )
    turned = {each.name: each.spec for at, each in enumerate(backward.inputs) if at in positions}
    return _Turning(replace(backward, inputs=inputs), sizes, turned=turned)


def _wishes(
    program: Program, sizes: Mapping[str, int], first: int, held: frozenset[int]
) -> frozenset[int]:
    """Saved values of loops that backward reads beside gradients in channels-last alone."""
    assert program.backward is not None
    turning = _relaid(program.backward, sizes, frozenset(i - first for i in held))
    made = {node.name: node for node in program.forward.nodes}
    fixed = frozenset(map(_name, program.forward.outputs[:first]))
    fixed |= _ends_of_windows(program.forward)
    found = set()
    for position in range(first, len(program.forward.outputs)):
        node = made.get(_name(program.forward.outputs[position]))
        free = position not in held and node is not None and node.name not in fixed
        if free and node is not None and _is_loop(node) and _can_turn(node.spec):
            lying = turning.beside(program.backward.inputs[position - first].name)
            found |= {position} if lying == {True} else set()
    return frozenset(found)


def _last(spec: TensorSpec) -> TensorSpec:
    return replace(spec, strides=channels_last_strides(spec.shape))


def _can_turn(spec: TensorSpec | None) -> bool:
    return spec is not None and len(spec.shape) in RANKS and not is_channels_last(spec)


def _is_given_so(spec: TensorSpec | None) -> bool:
    """Whether a convolution in channels-last gives other strides, be it for a size of one."""
    return spec is not None and len(spec.shape) in RANKS and spec != _last(spec)


def _is_loop(node: Node) -> bool:
    return node.op in SCALAR_OPS


def _moves(node: Node) -> bool:
    return is_canonical_view(node) or node.op == PAD


def _reads_any_layout(node: Node) -> bool:
    if node.op == WINDOW:
        return not node.argument(ROW_BY_ROW)
    swept = node.op.startswith(("reduce_", "scan_"))
    return _is_loop(node) or swept or node.op in (GRADIENT, "getitem")


def _ends_of_windows(graph: Graph) -> frozenset[str]:
    """What loops make of a window's result before anything is reduced: its epilogue may be that."""
    specs = graph.specs()
    ends: set[str] = set()
    after: set[str] = set()  # what waits for all of a result
    for node in graph.nodes:
        read = set(node.refs())
        whole = {name for name in read & ends if _shape(specs[name]) == _shape(node.spec)}
        if node.op == WINDOW or (_is_loop(node) and whole and not read & after):
            ends.add(node.name)
        elif read & (ends | after):
            after.add(node.name)
    return frozenset(ends)


def _name(arg: object) -> str:
    return arg.name if isinstance(arg, Ref) else arg if isinstance(arg, str) else ""


@dataclass(frozen=True)
class _Convolution:
    """The parts of either operator: the forward one's input, weight and result, by their specs."""

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
        """Whether the library gains by channels-last: what it transposes for itself it is spared.

        Of grouped convolutions those that give each channel its own weights gain, up to five times
        (H200); others lose, up to 31 times (PyTorch's own measurements).
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
    def is_product(self) -> bool:
        """Whether it is a product of the weights and an image as it lies, rows of 16 bytes."""
        taps, pixels = product(self.weight.shape[2:]), product(self.x.shape[2:])
        plain = taps == ONE and self.x.shape[2:] == self.y.shape[2:]
        return plain and pixels.factor % 4 == 0


@dataclass
class _Turning:
    """One graph on its way: `kept` outputs stay in channels-last, `wished` values are put there.

    `turned` are the values in channels-last, with their specs of before: at first, inputs.
    """

    graph: Graph
    sizes: Mapping[str, int]
    kept: frozenset[int] = frozenset()
    wished: frozenset[str] = frozenset()
    convolutions: frozenset[str] = frozenset()
    operands: frozenset[str] = frozenset()
    copies: dict[str, Ref] = field(default_factory=dict)
    turned: dict[str, TensorSpec] = field(default_factory=dict)
    restored: dict[str, Ref] = field(default_factory=dict)
    inherited: set[str] = field(default_factory=set)
    weights: frozenset[str] = frozenset()
    window_ends: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.builder = Builder(self.graph.inputs)
        others = (each for at, each in enumerate(self.graph.outputs) if at not in self.kept)
        self.given = frozenset(map(_name, others))
        specs, device = self.graph.specs(), main_device(self.graph)
        found: dict[str, Node] = {}
        lying = {n for n, spec in specs.items() if spec is not None and is_channels_last(spec)}
        lying |= frozenset(self.turned)
        for node in self.graph.nodes:
            parts = _Convolution.of(node, specs)
            if parts is not None and parts.fits(self.sizes, device):
                # A product is as good in either layout: it takes its images as they come.
                if not parts.is_product or lying.intersection(_operands(node)[:-1]):
                    found[node.name] = node
                    lying.add(node.name)
            elif _is_loop(node) or node.op == "getitem":
                whole = {n for n in node.refs() if _shape(specs[n]) == _shape(node.spec)}
                given = node.refs() if node.op == "getitem" else whole
                lying |= {node.name} if lying.intersection(given) else set()
        self.convolutions = frozenset(found)
        self.operands = frozenset(n for node in found.values() for n in _operands(node))
        self.weights = frozenset(_operands(node)[-1] for node in found.values())
        self.window_ends = _ends_of_windows(self.graph)

    @property
    def in_memory(self) -> frozenset[str]:
        """The values of the old graph that the new one has in memory in channels-last; weights
        are so small that backward had better make its own."""
        known = frozenset(self.copies) | frozenset(self.turned)
        return known - self.weights - self.inherited

    def run(self) -> Graph:
        if not self.convolutions and not self.wished and not self.turned:
            return self.graph
        for node in self.graph.nodes:
            self._add(node)
        outputs = tuple(self._output(at, each) for at, each in enumerate(self.graph.outputs))
        made = self.builder.graph(outputs)
        validate(made)
        return made

    def _add(self, node: Node) -> None:
        if node.name in self.convolutions:
            self._convolution(node)
        elif self._is_turned(node) or self._inherits(node):
            assert node.spec is not None
            self.turned[node.name] = node.spec
            self.builder.add(replace(node, spec=_last(node.spec)))
        elif _reads_any_layout(node):
            self.builder.add(node)
        else:
            names = {name: self._plain(name).name for name in node.refs()}
            self.builder.add(node.renamed(names))

    def _is_turned(self, node: Node) -> bool:
        """What loops compute for convolutions, and what a backward convolution gives."""
        if node.op == "getitem":
            return _name(node.args[0]) in self.convolutions and _is_given_so(node.spec)
        if not _can_turn(node.spec):
            return False
        wanted = node.name in self.operands | self.wished
        return _is_loop(node) and wanted and node.name not in self.window_ends

    def _inherits(self, node: Node) -> bool:
        """A loop's value lies as all that it is made of, should it come to memory at all."""
        if not _is_loop(node) or not _can_turn(node.spec) or node.name in self.given:
            return False
        specs = [self.builder.spec(name) for name in node.refs()]
        whole = [spec for spec in specs if spec.shape == _shape(node.spec)]
        found = bool(whole) and all(map(is_channels_last, whole))
        self.inherited |= {node.name} if found else set()
        return found

    def _convolution(self, node: Node) -> None:
        names = {name: self._in_channels_last(name, node).name for name in _operands(node)}
        if node.spec is not None and _is_given_so(node.spec):
            self.turned[node.name] = node.spec
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
        """A value in the layout it had before."""
        if name not in self.turned:
            return Ref(name)
        if name not in self.restored:
            copy = Node(f"{name}_plain", "cast", (Ref(name),), (), self.turned[name])
            self.restored[name] = self.builder.add(copy)
        return self.restored[name]

    def _output(self, at: int, output: str | Dim | None) -> str | Dim | None:
        if not isinstance(output, str):
            return output
        if at in self.kept and output in self.in_memory | self.wished:
            return output if output in self.turned else self.copies[output].name
        return self._plain(output).name

    def beside(self, name: str) -> set[bool]:
        """For each tensor in memory that meets this input in a loop: is it in channels-last?"""
        made = {node.name: node for node in self.graph.nodes}
        specs = self.graph.specs()
        seen, frontier = self._meeting(name)
        through = len(seen) > 1
        found: set[bool] = set()
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
                found.add(is_channels_last(spec) or (node is not None and self._is_turned(node)))
        return found

    def _meeting(self, name: str) -> tuple[set[str], list[str]]:
        """What meets this input in loops. Places are bytes, which backward moves and compares with
        numbers before they meet a gradient: so far they are followed, and what was made of them
        comes first."""
        users, specs = self.graph.users(), self.graph.specs()
        spec = specs[name]
        assert spec is not None
        least, places = spec.numel.at(self.sizes), spec.dtype == "uint8"
        same, met = [name], list[str]()
        for each in same:
            for user in users[each]:
                others = [specs[other] for other in user.refs() if other != each]
                alone = all(it is not None and it.numel.at(self.sizes) < least for it in others)
                if places and (_moves(user) or (_is_loop(user) and alone)):
                    same.append(user.name)
                elif _is_loop(user):
                    met += user.refs()
        return set(same), met


def _shape(spec: TensorSpec | None) -> tuple[Dim, ...]:
    return spec.shape if spec is not None else ()


def _operands(node: Node) -> tuple[str, ...]:
    """Input and weight, or the result's gradient, input and weight."""
    return tuple(_name(arg) for arg in node.args[: 2 if node.op == FORWARD else 3])
