"""Convolutions of our own: `fused_convolution` nodes, to which a plan adds an epilogue.

    convolution(x, w)    = fused_convolution(x, w), also if transposed
    its input gradient   = fused_convolution(dy, w), transposed if the convolution is not
    its weight gradient  = weight_gradient(x, dy); if transposed, weight_gradient(dy, x)

Small convolutions and other dtypes stay PyTorch calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusewright.cost import conv_direct as direct_cost
from fusewright.cost.conv_tensor_core import is_possible
from fusewright.cost.convolution import gradient_pays, is_worthwhile, prefers_direct
from fusewright.ir.convolution import SINGLE, ConvAxis, Geometry, by_eight
from fusewright.ir.graph import ONE, Arg, Graph, Node, Ref, TensorSpec, contiguous_strides
from fusewright.ir.operators import SCALAR_OPS
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.joins import CAT, joined
from fusewright.rewrite.layouts import BACKWARD, CONVOLUTION, FORWARD, GRADIENT, ROW_BY_ROW
from fusewright.rewrite.lower import main_device
from fusewright.rewrite.views import is_canonical_view
from fusewright.target.target import Target

RANKS = (3, 4, 5)
FEWEST_CHANNELS = 16  # of a group, if there are several: with fewer, tensor cores gain nothing
FURTHEST_CHANNELS = 2**31 - 1  # elements between two channels
# both operands' strides in eager mode, whatever their layout is later
EAGER_STRIDES = "eager_strides"
_BARE = "_bare"  # a convolution before its bias is added


def with_convolutions(
    graph: Graph, sizes: Mapping[str, int], target: Target, trains: bool = False
) -> Graph:
    """The same graph, with its larger float32 convolutions as `fused_convolution` nodes.

    `trains`: a backward graph follows, in which weight gradients may be PyTorch's and read the
    inputs in channels-last.
    """
    read = Counter(name for node in graph.nodes for name in node.refs())
    read.update(each for each in graph.outputs if isinstance(each, str))
    alone = frozenset(name for name, count in read.items() if count == 1)
    found = Builder(graph.inputs), sizes, main_device(graph), target, trains, alone
    building = _Building(*found, _beside_loops(graph))
    return building.builder.rewrite(graph, building.rewritten, building.add)


def _beside_loops(graph: Graph) -> frozenset[str]:
    """The values that loops make or read, and views of them."""
    loops = [node for node in graph.nodes if node.op in SCALAR_OPS or node.op.startswith("reduce_")]
    found = {name for node in loops for name in (node.name, *node.refs())}
    views = [node for node in graph.nodes if is_canonical_view(node)]
    for node in views:
        found.update([] if found.isdisjoint(node.refs()) else [node.name])
    for node in reversed(views):
        found.update(node.refs() if node.name in found else [])
    return frozenset(found)


@dataclass
class _Building:
    builder: Builder
    sizes: Mapping[str, int]
    device: str
    target: Target
    trains: bool
    read_once: frozenset[str]
    beside_loops: frozenset[str]  # values that loops make or read
    backward: dict[str, Node] = field(default_factory=dict)
    # the backward nodes whose input gradient is ours
    by_source: set[str] = field(default_factory=set)
    cats: dict[str, Node] = field(default_factory=dict)

    def add(self, node: Node) -> Ref:
        made = self.builder.add(node)
        if node.op == BACKWARD:
            self.backward[made.name] = node
        if node.op == CAT and node.name in self.read_once:
            self.cats[made.name] = node
        return made

    def rewritten(self, node: Node) -> Ref | None:
        if node.op == FORWARD:
            return self._forward(node)
        whole = self.backward.get(_name(node.args[0])) if node.op == "getitem" else None
        if whole is None or node.args[1] not in (0, 1):
            return None
        if node.args[1] == 1:
            beside = _name(node.args[0]) in self.by_source and not whole.args[7]
            return self._made(by_weight(node, whole), beside)
        made = self._made(by_source(node, whole))
        if made is not None:
            self.by_source.add(_name(node.args[0]))
        return made

    def _forward(self, node: Node) -> Ref | None:
        """If only this convolution reads a `cat`, read its parts directly: a plan may make them a
        prologue. Otherwise PyTorch's copy is as good."""
        bias, source = node.args[2], self.cats.get(_name(node.args[0]))
        if source is not None and self._worth(forward(node)) is not None:
            together = joined(self.builder, source) or node.args[0]
            node = replace(node, args=(together, *node.args[1:]))
        if not isinstance(bias, Ref):
            return self._made(forward(node))
        self.beside_loops |= {node.name}  # the bias is one
        bare = self._made(replace(forward(node), name=f"{node.name}{_BARE}"))
        return None if bare is None else self.builder.plus_channels(node, bare, bias)

    def _is_lone(self, node: Node) -> bool:
        """Whether no loop is beside a convolution, so that ours would save no pass. Of one tap it
        is a matmul, and cuDNN's is as fast as memory (H200, 64 → 128 channels of 16×512²: 0.84 ms
        and 0.77 by the input; ours 0.88 and 0.95)."""
        around = (node.name.removesuffix(_BARE), _name(node.args[0]))
        return node.op == CONVOLUTION and self.beside_loops.isdisjoint(around)

    def _made(self, node: Node, beside: bool = False) -> Ref | None:
        found = self._worth(node, beside)
        return None if found is None else self.add(found)

    def _worth(self, node: Node, beside: bool = False) -> Node | None:
        """The node, if our kernel for it pays; a weight gradient may pay only `beside` the input
        gradient."""
        specs = [self.builder.spec(name) for name in (_name(node.args[0]), _name(node.args[1]))]
        here = all(spec.device == self.device for spec in specs)
        if not here or obstacle(node, *specs):
            return None
        of = _sizes(node, *specs)
        if of.taps == 1 and not of.strided and of.groups == 1 and self._is_lone(node):
            return None
        strides = (EAGER_STRIDES, tuple(spec.strides for spec in specs))
        node = replace(node, kwargs=(*node.kwargs, strides))
        if node.op == GRADIENT:
            by_depthwise = direct_cost.has_depthwise_gradient(of)
            worth = by_depthwise or gradient_pays(of, self.sizes, self.target, beside)
            return node if worth else None
        row_by_row = specs[0].strides[-1] == ONE
        known = of, self.sizes, self.target
        channels_last = self.trains and not (of.transposed or gradient_pays(*known, True))
        if not is_worthwhile(*known, row_by_row, channels_last):
            return None
        thin = row_by_row and prefers_direct(*known)
        return replace(node, kwargs=(*node.kwargs, (ROW_BY_ROW, thin)))


def forward(node: Node) -> Node:
    """A convolution without its bias."""
    x, weight, _, stride, padding, dilation, transposed, _, groups = node.args
    args = (x, weight, stride, padding, dilation, groups, bool(transposed))
    instead = _instead("forward", node.args[3:9])
    return Node(node.name, CONVOLUTION, args, instead, node.spec, node.source)


def by_source(node: Node, whole: Node) -> Node:
    """The gradient with respect to the convolution's input: the first result of `whole`."""
    dy, _, weight, _, stride, padding, dilation, transposed, _, groups, _ = whole.args
    args = (dy, weight, stride, padding, dilation, groups, not transposed)
    instead = _instead("input", whole.args[4:10])
    return Node(node.name, CONVOLUTION, args, instead, node.spec, node.source)


def by_weight(node: Node, whole: Node) -> Node:
    """The gradient with respect to the weights: the second result of `whole`.

    A transposed convolution is the input gradient of a convolution that reads its result.
    """
    dy, x, _, _, stride, padding, dilation, transposed, _, groups, _ = whole.args
    args = (*((dy, x) if transposed else (x, dy)), stride, padding, dilation, groups)
    instead = _instead("weight", whole.args[4:10])
    return Node(node.name, GRADIENT, args, instead, node.spec, node.source)


def obstacle(node: Node, source: TensorSpec, other: TensorSpec) -> str:
    """What our kernels do not support about such a node; "" if they support it."""
    assert node.spec is not None
    whole = (source, other, node.spec)
    weight = other if node.op == CONVOLUTION else node.spec
    if {spec.dtype for spec in whole} != {"float32"}:
        return source.dtype
    if len(source.shape) not in RANKS:
        return f"{len(source.shape) - 2} spatial dimensions"
    sizes = [size for spec in whole for size in spec.shape[1:]]
    if not all(size.is_static for size in (*sizes, weight.shape[0], *weight.strides)):
        return "dynamic sizes other than the batch"
    if node.op == CONVOLUTION and node.spec.strides != contiguous_strides(node.spec.shape):
        return "an output that is not contiguous"
    of = _sizes(node, source, other)
    images = (source,) if node.op == CONVOLUTION else (source, other)
    if any(spec.strides[1].factor > FURTHEST_CHANNELS for spec in images):
        return "channels that are 2^31 or more elements apart"
    direct = node.op == CONVOLUTION and source.strides[-1] == ONE and direct_cost.fits(of)
    direct = direct or (node.op == GRADIENT and direct_cost.has_depthwise_gradient(of))
    if of.groups > 1 and of.channels < FEWEST_CHANNELS and not direct:
        return f"{of.groups} groups of fewer than {FEWEST_CHANNELS} channels"
    if node.op == CONVOLUTION and not of.has_rows_and_columns:
        return "a single output channel or position"
    possible = is_possible(of) and is_possible(by_eight(of))
    return "" if possible else "strides this wide or this many taps"


def _name(arg: Arg) -> str:
    return arg.name if isinstance(arg, Ref) else ""


def _numbers(arg: Arg, rank: int) -> tuple[int, ...]:
    """One value per axis; PyTorch also accepts a single value for all axes."""
    assert isinstance(arg, tuple)
    given = [each for each in arg if isinstance(each, int)]
    assert len(given) == len(arg) and len(given) in (1, rank)
    return tuple(given * rank)[:rank]


def _instead(which: str, numbers: tuple[Arg, ...]) -> tuple[tuple[str, Arg], ...]:
    return (("instead", (which, numbers)),)


def library_pass(node: Node) -> tuple[str, tuple[Arg, ...]]:
    """Which PyTorch convolution a node stands for (forward, input, weight), and its parameters."""
    given = node.argument("instead")
    assert isinstance(given, tuple)
    which, numbers = given
    assert isinstance(which, str) and isinstance(numbers, tuple)
    return which, numbers


def geometry_of(node: Node, source: TensorSpec, weight: TensorSpec) -> Geometry:
    """The sizes of a `fused_convolution` node."""
    assert node.spec is not None
    return _geometry(node, source, weight, node.spec, bool(node.args[6]))


def gradient_geometry(node: Node, source: TensorSpec, grad_output: TensorSpec) -> Geometry:
    """The sizes of the convolution whose weight gradient the node is."""
    assert node.spec is not None
    return _geometry(node, source, node.spec, grad_output, False)


def _sizes(node: Node, source: TensorSpec, other: TensorSpec) -> Geometry:
    of = geometry_of if node.op == CONVOLUTION else gradient_geometry
    return of(node, source, other)


def _geometry(
    node: Node, source: TensorSpec, weight: TensorSpec, result: TensorSpec, transposed: bool
) -> Geometry:
    """A transposed convolution's weights have input channels first."""
    groups = node.args[5]
    assert isinstance(groups, int)
    first, second = (size.factor for size in weight.shape[:2])
    channels, results = (first // groups, second) if transposed else (second, first // groups)
    stride, padding, dilation = (_numbers(arg, len(weight.shape) - 2) for arg in node.args[2:5])
    sizes, taps, made = (
        [size.factor for size in spec.shape[2:]] for spec in (source, weight, result)
    )
    axes = zip(sizes, made, taps, stride, dilation, padding, strict=True)
    given = [replace(ConvAxis(*each), transposed=transposed) for each in axes]
    single = replace(SINGLE, transposed=transposed)
    z, y, x = [single] * (3 - len(given)) + given
    return Geometry(source.shape[0], groups, channels, results, y, x, z=z)
