"""One way to write each scalar operator, so that equal expressions become equal nodes.

    op(x, full(c)) = op(x, c)               a constant tensor is a number
    op(x, expand(y)) = op(x, y)             broadcasting expands anyway
    op(copy(x), y) = op(x, y)
    a + b = b + a                           the operand of the result's shape comes first, then the
                                            one that took more steps; numbers come last
    c < x = x > c

All of these keep every bit, signs of zeros and NaN included. (The payload of a NaN may differ.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fusewright.ir.graph import FLOATS, HALF_DTYPES, ONE, Arg, Dim, Node, Ratio, Ref, TensorSpec
from fusewright.rewrite.numbers import folded, in_kind

_COMMUTATIVE = frozenset(
    "add mul eq ne bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor".split()
)
MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
# Of two zeros these return the second, so only a number other than zero may be moved.
_ORDERED_ZEROS = frozenset({"maximum", "minimum"})
_VIEWS = frozenset(
    {"aten.view.default", "aten.permute.default", "aten.expand.default", "aten.slice.Tensor"}
)


Rank = tuple[int, str, int]


@dataclass
class Known:
    """What is known about the values of a graph under construction.

    `numbers` are the elements of constant tensors. `sources` are the operands of copies and
    expansions. `ranks` say how many steps a value took, and its place among those of equal steps.
    """

    specs: dict[str, TensorSpec | None]
    numbers: dict[str, Arg] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, Rank] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = {name: (0, "", position) for position, name in enumerate(self.specs)}

    def note(self, node: Node) -> None:
        """Remember a node that was added."""
        read = node.refs()
        source = read[0] if read else ""
        if node.op == "full":
            self.numbers[node.name] = node.args[0]
        elif node.op == "aten.expand.default" or self._is_copy(node) or self._drops_ones(node):
            self.sources[node.name] = self.sources.get(source, source)
        if source and (node.op in _VIEWS or node.name in self.sources):
            self.ranks[node.name] = self.ranks[source]
        else:
            steps = 1 + max((self.ranks[name][0] for name in read), default=0)
            self.ranks[node.name] = (steps, node.op, len(self.ranks))

    def _is_copy(self, node: Node) -> bool:
        """Whether it copies; in 16 bits the same operator rounds a value of more digits."""
        if node.op != "cast" or node.spec is None or node.spec.dtype in HALF_DTYPES:
            return False
        return self.spec(node.refs()[0]).dtype == node.spec.dtype

    def _drops_ones(self, node: Node) -> bool:
        """Whether it is a view whose last dimensions are those of its operand's source, and the
        others are of size one or expanded."""
        if node.op != "aten.view.default" or node.spec is None:
            return False
        viewed = node.refs()[0]
        base = self.sources.get(viewed, viewed)
        wide, small, last = (
            self.spec(viewed).shape,
            self.spec(base).shape,
            len(self.spec(base).shape),
        )
        if not last or not small == wide[-last:] == node.spec.shape[-last:]:
            return False
        return base != viewed or all(size == ONE for size in node.spec.shape[:-last])

    def spec(self, name: str) -> TensorSpec:
        spec = self.specs[name]
        assert spec is not None, f"{name} has several results"
        return spec


def normal(node: Node, known: Known) -> Node:
    """A scalar operator in its normal form; the node itself if it is in it."""
    assert node.spec is not None
    constant = _folded(node, known)
    if constant is not None:
        return replace(node, op="full", args=(constant,))
    args = list(node.args)
    for position, arg in enumerate(node.args):
        for simpler in _simpler(arg, _dtype_at(node, position, known), known):
            trial = [*args[:position], simpler, *args[position + 1 :]]
            if _shape(trial, known) == node.spec.shape and _any_ref(trial):
                args = trial
    args = [_written(arg, _dtype_at(node, at, known)) for at, arg in enumerate(args)]
    op, ordered = _ordered(node, tuple(args), known)
    same = op == node.op and _texts(ordered) == _texts(node.args)
    return node if same else replace(node, op=op, args=ordered)


def _written(arg: Arg, dtype: str) -> Arg:
    """A number or size as the dtype writes it."""
    if isinstance(arg, Dim) and dtype in FLOATS:
        return Ratio(f"(1.0*{arg})")
    return in_kind(arg, dtype) if isinstance(arg, int | float) else arg


def _texts(args: tuple[Arg, ...]) -> list[str]:
    """For comparison: 2 and 2.0 are different."""
    return [repr(arg) for arg in args]


def _any_ref(args: list[Arg]) -> bool:
    return any(isinstance(arg, Ref) for arg in args)


def _simpler(arg: Arg, dtype: str, known: Known) -> list[Arg]:
    """What may stand for an operand, the simplest last."""
    if not isinstance(arg, Ref):
        return []
    name = known.sources.get(arg.name, arg.name)
    found: list[Arg] = [Ref(name)] if name != arg.name else []
    if name in known.numbers and known.spec(name).dtype == dtype:
        found.append(known.numbers[name])
    return found


def _dtype_at(node: Node, position: int, known: Known) -> str:
    """The dtype in which an operator takes this operand."""
    assert node.spec is not None
    if node.op == "where":
        return "bool" if position == 0 else node.spec.dtype
    read = node.refs()
    return known.spec(read[0]).dtype if read else node.spec.dtype


def _shape(args: list[Arg], known: Known) -> tuple[Dim, ...]:
    return broadcast([known.spec(arg.name).shape for arg in args if isinstance(arg, Ref)])


def _folded(node: Node, known: Known) -> Arg:
    """The number that an operator of constants gives, or None."""
    assert node.spec is not None
    values = [known.numbers.get(arg.name) if isinstance(arg, Ref) else arg for arg in node.args]
    numbers = tuple(each for each in values if isinstance(each, int | float))
    if len(numbers) < len(node.args) or not node.refs():
        return None
    kinds = {known.spec(name).dtype for name in node.refs()}
    if len(kinds) > 1:
        return None
    return folded(node.op, numbers, kinds.pop(), node.spec.dtype)


def _ordered(node: Node, args: tuple[Arg, ...], known: Known) -> tuple[str, tuple[Arg, ...]]:
    """The operator and its operands, exchanged if their order is not the fixed one."""
    if len(args) != 2 or node.op not in _COMMUTATIVE | _ORDERED_ZEROS | MIRRORED.keys():
        return node.op, args
    left, right = args
    if node.op in _ORDERED_ZEROS:
        moved = isinstance(left, int | float) and left == left and left != 0
        return node.op, (right, left) if moved else args
    assert node.spec is not None
    if node.op in MIRRORED:
        return (node.op, args) if isinstance(left, Ref) else (MIRRORED[node.op], (right, left))
    ordered = _place(left, node.spec, known) <= _place(right, node.spec, known)
    return node.op, args if ordered else (right, left)


def _place(arg: Arg, spec: TensorSpec, known: Known) -> tuple[int, int, str, int]:
    if not isinstance(arg, Ref):
        return (2, 0, "", 0)
    steps, op, index = known.ranks[arg.name]
    return (int(known.spec(arg.name).shape != spec.shape), -steps, op, index)


def broadcast(shapes: list[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Dim] = []
    for position in range(rank):
        sizes = [
            shape[position - rank + len(shape)]
            for shape in shapes
            if position - rank + len(shape) >= 0
        ]
        result.append(next((size for size in sizes if size != ONE), ONE))
    return tuple(result)
