"""Convolutions for tensor cores: `window` nodes, which a plan ends in what follows them.

    convolution(x, w) = window(x, w)
    its gradient by x = window(dy, w backwards, results and channels swapped), for strides of one
    its gradient by w = window_gradient(x, dy)

Wide strides' gradient by x, and what is small or of another type, stay PyTorch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusewright.ir import Arg, Graph, Node, Ref, TensorSpec, contiguous_strides, validate
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.layouts import BACKWARD, FORWARD
from fusewright.rewrite.lower import main_device
from fusewright.window import Geometry, WindowAxis
from fusewright.window_cost import is_possible, is_worthwhile

WINDOW = "window"
GRADIENT = "window_gradient"
RANKS = (3, 4)
FEWEST_CHANNELS = 16  # of a group, where there are several: below that tensor cores have no work


def with_windows(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """The same graph, its larger float32 convolutions as `window` nodes."""
    building = _Building(Builder(graph.inputs), sizes, main_device(graph))
    builder = building.builder
    for node in graph.nodes:
        known = builder.resolved(node)
        made = building.rewritten(known)
        builder.substitute(node.name, made if made is not None else building.add(known))
    result = builder.graph(graph.outputs)
    validate(result)
    return result


@dataclass
class _Building:
    builder: Builder
    sizes: Mapping[str, int]
    device: str
    backward: dict[str, Node] = field(default_factory=dict)

    def add(self, node: Node) -> Ref:
        made = self.builder.add(node)
        if node.op == BACKWARD:
            self.backward[made.name] = node
        return made

    def rewritten(self, node: Node) -> Ref | None:
        if node.op == FORWARD:
            x, weight, bias, *rest = node.args
            if not isinstance(bias, Ref):
                return self._window(node, x, weight, rest, ())
            bare = self._window(replace(node, name=f"{node.name}_bare"), x, weight, rest, ())
            return None if bare is None else self.builder.plus_channels(node, bare, bias)
        whole = self.backward.get(_name(node.args[0])) if node.op == "getitem" else None
        if whole is None:
            return None
        return self._by_weight(node, whole) if node.args[1] == 1 else self._by_source(node, whole)

    def _by_weight(self, node: Node, whole: Node) -> Ref | None:
        """The gradient of a convolution by its weights."""
        dy, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = whole.args
        like = Node("", WINDOW, (x, weight, stride, padding, dilation, groups, False), (), None)
        spec = self.builder.spec(_name(dy))
        if transposed or not self._fits(replace(like, spec=spec)):
            return None
        args = (x, dy, stride, padding, dilation, groups)
        instead = _instead("weight", whole.args[4:10])
        return self.add(Node(node.name, GRADIENT, args, instead, node.spec, node.source))

    def _by_source(self, node: Node, whole: Node) -> Ref | None:
        """The gradient of a convolution by what it slides over, where its strides are one."""
        if node.args[1] != 0:
            return None
        dy, _, weight, _, stride, padding, dilation, *others = whole.args[:-1]
        taps = self.builder.spec(_name(weight)).shape[2:]
        rank = len(taps)
        if set(_numbers(stride, rank)) != {1} or not all(size.is_static for size in taps):
            return None
        steps = zip(_numbers(dilation, rank), taps, _numbers(padding, rank), strict=True)
        zeros = tuple(step * (size.factor - 1) - before for step, size, before in steps)
        here = [stride, zeros, dilation, *others]
        return self._window(node, dy, weight, here, whole.args[4:10])

    def _window(
        self, node: Node, source: Arg, weight: Arg, rest: list[Arg], backwards: tuple[Arg, ...]
    ) -> Ref | None:
        """`backwards` are the numbers of the convolution whose gradient this is."""
        stride, padding, dilation, transposed, _, groups = rest
        contiguous = node.spec and node.spec.strides == contiguous_strides(node.spec.shape)
        if transposed or not contiguous or (backwards and groups != 1):
            return None
        args = (source, weight, stride, padding, dilation, groups, bool(backwards))
        instead = _instead("input", backwards) if backwards else _instead("forward", tuple(rest))
        made = Node(node.name, WINDOW, args, instead, node.spec, node.source)
        return self.add(made) if self._fits(made) else None

    def _fits(self, node: Node) -> bool:
        specs = [self.builder.spec(name) for name in (_name(node.args[0]), _name(node.args[1]))]
        whole = [*specs, node.spec]
        if not all(spec is not None and _is_plain(spec, self.device) for spec in whole):
            return False
        assert node.spec is not None
        geometry = geometry_of(node, *specs)
        static = all(stride.is_static for stride in specs[1].strides)
        return (
            static
            and min(geometry.y.before, geometry.x.before) >= 0
            and (geometry.groups == 1 or geometry.channels >= FEWEST_CHANNELS)
            and geometry.has_rows_and_columns
            and is_possible(geometry)
            and is_worthwhile(geometry, self.sizes)
        )


def _name(arg: Arg) -> str:
    return arg.name if isinstance(arg, Ref) else ""


def _is_plain(spec: TensorSpec, device: str) -> bool:
    """float32 on the main device, sizes known but for the number of images."""
    return (
        spec.dtype == "float32"
        and spec.device == device
        and len(spec.shape) in RANKS
        and all(size.is_static for size in spec.shape[1:])
    )


def _numbers(arg: Arg, rank: int) -> tuple[int, ...]:
    """One number for each axis; PyTorch takes a single one for all of them, too."""
    assert isinstance(arg, tuple)
    given = [each for each in arg if isinstance(each, int)]
    assert len(given) == len(arg) and len(given) in (1, rank)
    return tuple(given * rank)[:rank]


def _instead(which: str, numbers: tuple[Arg, ...]) -> tuple[tuple[str, Arg], ...]:
    return (("instead", (which, numbers)),)


def library_pass(node: Node) -> tuple[str, tuple[Arg, ...]]:
    """The pass of PyTorch's convolution that a node stands for, and that convolution's numbers."""
    given = node.argument("instead")
    assert isinstance(given, tuple)
    which, numbers = given
    assert isinstance(which, str) and isinstance(numbers, tuple)
    return which, numbers


def reads_backwards(node: Node) -> bool:
    """Whether a window takes the weights as the gradient of a convolution does."""
    return bool(node.args[6])


def geometry_of(node: Node, source: TensorSpec, weight: TensorSpec) -> Geometry:
    """The sizes of a `window` node."""
    assert node.spec is not None
    return _geometry(node, source, weight, node.spec, reads_backwards(node))


def gradient_geometry(node: Node, source: TensorSpec, change: TensorSpec) -> Geometry:
    """The sizes of the convolution that a `window_gradient` node is of."""
    assert node.spec is not None
    return _geometry(node, source, node.spec, change, False)


def _geometry(
    node: Node, source: TensorSpec, weight: TensorSpec, result: TensorSpec, backwards: bool
) -> Geometry:
    groups = node.args[5]
    assert isinstance(groups, int)
    results, channels = (size.factor for size in weight.shape[:2])
    if backwards:
        results, channels = channels, results
    stride, padding, dilation = (_numbers(arg, len(weight.shape) - 2) for arg in node.args[2:5])
    sizes, taps, made = (
        [size.factor for size in spec.shape[2:]] for spec in (source, weight, result)
    )
    axes = zip(sizes, made, taps, stride, dilation, padding, strict=True)
    *rows, x = (WindowAxis(*each) for each in axes)
    y = rows[0] if rows else WindowAxis(1, 1, 1, 1, 1, 0)
    return Geometry(source.shape[0], groups, channels, results // groups, y, x)
