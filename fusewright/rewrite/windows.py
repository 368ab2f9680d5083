"""Convolutions for tensor cores: `window` nodes, which a plan ends in what follows them.

    convolution(x, w) = window(x, w)
    its gradient by x = window(dy, w backwards, results and channels swapped), for strides of one

The gradient by w, wide strides' gradient by x, and what is small or of another type stay PyTorch's.
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
                return self._window(node, x, weight, rest, False)
            bare = self._window(replace(node, name=f"{node.name}_bare"), x, weight, rest, False)
            return None if bare is None else self.builder.plus_channels(node, bare, bias)
        whole = self.backward.get(_name(node.args[0])) if node.op == "getitem" else None
        if whole is None or node.args[1] != 0:
            return None
        dy, _, weight, _, stride, padding, dilation, *others = whole.args[:-1]
        taps = self.builder.spec(_name(weight)).shape[2:]
        if set(_numbers(stride)) != {1} or not all(size.is_static for size in taps):
            return None
        steps = zip(_numbers(dilation), taps, _numbers(padding), strict=True)
        zeros = tuple(step * (size.factor - 1) - before for step, size, before in steps)
        return self._window(node, dy, weight, [stride, zeros, dilation, *others], True)

    def _window(
        self, node: Node, source: Arg, weight: Arg, rest: list[Arg], backwards: bool
    ) -> Ref | None:
        stride, padding, dilation, transposed, _, groups = rest
        if transposed or (backwards and groups != 1):
            return None
        args = (source, weight, stride, padding, dilation, groups, backwards)
        made = Node(node.name, WINDOW, args, (), node.spec, node.source)
        return self.add(made) if self._fits(made) else None

    def _fits(self, node: Node) -> bool:
        specs = [self.builder.spec(name) for name in (_name(node.args[0]), _name(node.args[1]))]
        whole = [*specs, node.spec]
        if not all(spec is not None and _is_plain(spec, self.device) for spec in whole):
            return False
        assert node.spec is not None
        geometry = geometry_of(node, *specs)
        return (
            node.spec.strides == contiguous_strides(node.spec.shape)
            and min(geometry.y.before, geometry.x.before) >= 0
            and (geometry.groups == 1 or geometry.channels >= FEWEST_CHANNELS)
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


def _numbers(arg: Arg) -> tuple[int, ...]:
    assert isinstance(arg, tuple)
    return tuple(each for each in arg if isinstance(each, int))


def reads_backwards(node: Node) -> bool:
    """Whether a window takes the weights as the gradient of a convolution does."""
    return bool(node.args[6])


def geometry_of(node: Node, source: TensorSpec, weight: TensorSpec) -> Geometry:
    """The sizes of a `window` node."""
    assert node.spec is not None
    groups = node.args[5]
    assert isinstance(groups, int)
    results, channels = (size.factor for size in weight.shape[:2])
    if reads_backwards(node):
        results, channels = channels, results
    stride, padding, dilation = (_numbers(arg) for arg in node.args[2:5])
    sizes, taps, made = (
        [size.factor for size in spec.shape[2:]] for spec in (source, weight, node.spec)
    )
    axes = zip(sizes, made, taps, stride, dilation, padding, strict=True)
    *rows, x = (WindowAxis(*each) for each in axes)
    y = rows[0] if rows else WindowAxis(1, 1, 1, 1, 1, 0)
    return Geometry(source.shape[0], groups, channels, results // groups, y, x)
