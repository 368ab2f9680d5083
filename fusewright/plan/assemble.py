"""From a set of values to one loop's body: the arithmetic of every value, down to its loads.

An *item* is a value that the kernel computes for its own sake: a reduction or a stored result.
Pointwise operators between items and memory are inlined where they are read.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusewright.ir.graph import HALF_DTYPES, Arg, Dim, Node, Ratio, Ref, TensorSpec
from fusewright.ir.loop import (
    Apply,
    Constant,
    Guard,
    Index,
    Instruction,
    Load,
    Reduce,
    Scan,
    Store,
)
from fusewright.plan.domain import Domain
from fusewright.plan.frames import (
    ElementIndex,
    NeedSplitError,
    NotFusibleError,
    access,
    guards,
)
from fusewright.plan.spaces import IndexedValue
from fusewright.plan.values import Role, Values, is_scan
from fusewright.rewrite.padding import PAD, pad_value

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


@dataclass(frozen=True)
class Assembled:
    """A kernel's body over row-major axes, before it is named and its stores are chosen.

    `reads` says for each value, at each index it is needed at, what it is computed from.
    """

    domain: Domain
    body: tuple[Instruction, ...]
    stores: dict[str, Store]
    loads: tuple[str, ...]
    inlined: frozenset[str]
    reads: Mapping[IndexedValue, tuple[IndexedValue, ...]]


def assemble(values: Values, items: tuple[str, ...], domain: Domain) -> Assembled:
    """Build the body; split axes where views need it. Raises NotFusibleError."""
    while True:  # ends: each split makes an axis smaller
        try:
            return _Assembly(values, items, domain).run()
        except NeedSplitError as need:
            domain = domain.split(need.position, need.inner)


@dataclass
class _Assembly:
    values: Values
    items: tuple[str, ...]
    domain: Domain
    body: list[Instruction] = field(default_factory=list)
    reads: dict[IndexedValue, tuple[IndexedValue, ...]] = field(default_factory=dict)
    known: dict[IndexedValue, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    loads: dict[str, None] = field(default_factory=dict)
    homes: dict[str, ElementIndex] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    made: dict[str, Load | Constant | Index | Apply | Reduce | Scan] = field(default_factory=dict)
    constants: dict[tuple[str, str], str] = field(default_factory=dict)
    reduced: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.space = self.values.space(self.domain.sizes)
        self.reduced_axes, self.numel = self.domain.reduced_axes, self.domain.numel

    def run(self) -> Assembled:
        for item in self.items:
            self.homes[item] = self._home(item)
        for name, index in self._indexed_values():
            self.value(name, index)
        stores = {}
        for item in self.items:
            value = self.value(item, self.homes[item])
            where = self.space.access(item, self.homes[item])
            stores[item] = Store(value, self.values.spec(item).dtype, where)
        inlined = frozenset(name for name, _ in self.known if name in self.values.nodes)
        inlined -= set(self.homes)
        return Assembled(
            self.domain, tuple(self.body), stores, tuple(self.loads), inlined, self.reads
        )

    def _home(self, item: str) -> ElementIndex:
        """The index at which the kernel computes an item: over all axes, or the outer ones."""
        reduction = self.values.reduction_of(item)
        domain = self.domain
        if reduction is not None:
            source = self._operand_index(reduction)
            dims = reduction.args[1]
            assert isinstance(dims, tuple)
            axes = {axis for d in dims if isinstance(d, int) for axis in source[d].axes}
            if axes != set(self.reduced_axes):
                raise NotFusibleError("reductions run over different axes")
            return tuple(each for d, each in enumerate(source) if d not in dims)
        if is_scan(self.values.nodes[item]):
            whole = self.space.whole(item)
            along = self.values.nodes[item].args[1]
            assert isinstance(along, int)
            if whole[along].axes != self.reduced_axes:
                raise NotFusibleError("a scan runs along other axes")
            return whole
        if self.values.spec(item).numel == self.numel:
            return self.space.whole(item)
        return self.space.index_over(item, domain.kept_axes)

    def _operand_index(self, reduction: Node) -> ElementIndex:
        assert isinstance(reduction.args[0], Ref)
        return self.space.whole(reduction.args[0].name)

    def _indexed_values(self) -> list[IndexedValue]:
        """Every value that the items depend on, at each index it is read at, in graph order.

        A value's readers come after it in the graph. We walk backwards, so all its readers are
        known when we reach it. There is no recursion: chains of operators may have any length.
        """
        order = self.values.order
        wanted: dict[str, dict[ElementIndex, None]] = {}
        for item, home in self.homes.items():
            wanted.setdefault(item, {})[home] = None
        frontier = [(-order[name], name) for name in wanted]
        heapq.heapify(frontier)
        found: list[IndexedValue] = []
        while frontier:
            _, name = heapq.heappop(frontier)
            for at in [(name, index) for index in wanted[name]]:
                self.reads[at] = self._operands_of(*at)
                found.append(at)
                for source, index in self.reads[at]:
                    if source in order and source not in wanted:
                        heapq.heappush(frontier, (-order[source], source))
                    wanted.setdefault(source, {})[index] = None
        return found[::-1]

    def _operands_of(self, name: str, index: ElementIndex) -> tuple[IndexedValue, ...]:
        """The values that this one is computed from; none if it is loaded."""
        values = self.values
        node = values.nodes[name]
        if name in self.homes and index != self.homes[name]:
            raise NotFusibleError(f"{name} is read at another index than it is computed at")
        role = self._role(name)
        if role is Role.REDUCED:
            reduction = values.reduction_of(name)
            assert reduction is not None and isinstance(reduction.args[0], Ref)
            return ((reduction.args[0].name, self._operand_index(reduction)),)
        return () if role is Role.LOADED else self.space.operands(node, index)

    def _role(self, name: str) -> Role:
        found = self.roles.get(name)
        if found is None:
            found = self.roles[name] = self.values.role(name, name in self.homes)
        return found

    def value(self, name: str, index: ElementIndex) -> str:
        """The name of the loop value that is `name` at `index`; it is computed on first use."""
        at = (name, index)
        if at not in self.known:
            self.known[at] = self._compute(name, index)
        return self.known[at]

    def _read(self, name: str, index: ElementIndex, reader: str = "") -> str:
        """The value as another one in this kernel reads it. A value that may also be stored, or
        that backward computes, is rounded as memory would round it, so that both agree. The operand
        of a reduction is not rounded, unless backward repeats the reduction: the sum behind a mean
        may exceed the range of a 16-bit type."""
        value = self.value(name, index)
        while (role := self._role(name)) is Role.FOLLOWED:
            ((name, index),) = self.reads[name, index]
        stored = role in (Role.APPLIED, Role.SCANNED) or reader in self.values.repeated
        stored = stored and name in self.homes
        stored = stored or (role is Role.APPLIED and name in self.values.shared)
        return self._rounded(value) if stored else value

    def _compute(self, name: str, index: ElementIndex) -> str:
        match self._role(name):
            case Role.FOLLOWED:
                ((source, inner),) = self.reads[name, index]
                return self.value(source, inner)
            case Role.REDUCED:
                return self._reduce(name, index)
            case Role.SCANNED:
                return self._scan(self.values.nodes[name], index)
            case Role.APPLIED:
                return self._apply(self.values.nodes[name], index)
            case Role.LOADED:
                return self._load(name, index)

    def _load(
        self,
        name: str,
        index: ElementIndex,
        outside: int | float | bool = 0,
        inside: tuple[Guard, ...] | None = None,
    ) -> str:
        self.loads[name] = None
        where = self.space.access(name, index)
        where = where if inside is None else replace(where, guards=inside)
        return self._emit(Load(self._fresh(name), self.values.spec(name).dtype, where, outside))

    def _pad(self, node: Node, dtype: str, index: ElementIndex) -> str:
        """The padded value, if its index is inside; a load is guarded and reads nothing outside."""
        (operand,) = self.reads[node.name, index]
        inside = guards(self.values.spec(operand[0]).shape, operand[1], self.domain.sizes)
        if not inside:
            return self._read(*operand, node.name)
        name, at = operand
        while self._role(name) is Role.FOLLOWED:
            ((name, at),) = self.reads[name, at]
        outside = pad_value(node)
        if self._role(name) is Role.LOADED:  # a view of it is inside it, too
            return self._load(name, at, outside, inside)
        value = self._read(*operand, node.name)
        operands = (self._inside(inside), value, self._constant(outside, dtype, "c"))
        return self._emit(Apply(self._fresh(node.name), dtype, "where", operands))

    def _inside(self, inside: tuple[Guard, ...]) -> str:
        """Whether all guards hold."""
        found = [
            self._once(Index("inside", "bool", each.steps, (Dim(each.start),), each.size))
            for each in inside
        ]
        while len(found) > 1:
            both = (found.pop(), found.pop())
            found.append(self._once(Apply("inside", "bool", "logical_and", both)))
        return found[0]

    def _once(self, item: Index | Apply) -> str:
        """The value of an instruction that neighbouring windows share."""
        key = (repr(item), ())
        if key not in self.known:
            self.known[key] = self._emit(replace(item, name=self._fresh(item.name)))
        return self.known[key]

    def _reduce(self, name: str, index: ElementIndex) -> str:
        node = self.values.reduction_of(name)
        assert node is not None
        ((source, inner),) = self.reads[name, index]
        operand = self._read(source, inner)
        dtype = self.values.spec(source).dtype
        kind = node.op.removeprefix("reduce_")
        if kind == "welford":
            return self._welford(node, name, operand, dtype)
        key = (dtype, kind, operand)  # the sum over some axes may be the first step of another
        if key not in self.reduced:
            self.reduced[key] = self._emit(Reduce(self._fresh(name), dtype, kind, operand))
        return self.reduced[key]

    def _welford(self, node: Node, name: str, operand: str, dtype: str) -> str:
        """One reduction gives both results, whichever is needed first."""
        mean, m2 = (self._fresh(f"{node.name}_{part}") for part in ("mean", "m2"))
        self._emit(Reduce(mean, dtype, "welford", operand, m2))
        for item in self.homes:
            if item != name and self.values.reduction_of(item) is node:
                other = self.values.nodes[item].args[1]
                self.known[(item, self.homes[item])] = m2 if other == 1 else mean
        return m2 if self.values.nodes[name].args[1] == 1 else mean

    def _scan(self, node: Node, index: ElementIndex) -> str:
        assert node.spec is not None
        ((source, inner),) = self.reads[node.name, index]
        kind, operand = node.op.removeprefix("scan_"), self._read(source, inner)
        made = Scan(self._fresh(node.name), node.spec.dtype, kind, operand, bool(node.args[2]))
        return self._emit(made)

    def _apply(self, node: Node, index: ElementIndex) -> str:
        assert node.spec is not None
        if node.op == "full":
            return self._constant(node.args[0], node.spec.dtype, node.name)
        if node.op == "iota":
            return self._iota(node, node.spec, index)
        if node.op == PAD:
            return self._pad(node, node.spec.dtype, index)
        operands = self._operands(node, index)
        if node.op in _COMPARISONS:
            operands = tuple(self._rounded(name) for name in operands)
        result = Apply(self._fresh(node.name), node.spec.dtype, node.op, operands)
        return self._emit(result)

    def _rounded(self, name: str) -> str:
        """A 16-bit value as it would be in memory.

        Registers hold more digits than the stored value that backward compares with. Without this,
        amax(x) would equal no element of x.
        """
        item = self.made[name]
        if item.dtype not in HALF_DTYPES or isinstance(item, Load):
            return name
        key = (f"{name} rounded", ())
        if key not in self.known:
            self.known[key] = self._emit(
                Apply(self._fresh(f"{name}_rounded"), item.dtype, "cast", (name,))
            )
        return self.known[key]

    def _operands(self, node: Node, index: ElementIndex) -> tuple[str, ...]:
        """Tensors as loop values; numbers as constants of the type that the operator uses."""
        dtype = self._compute_dtype(node)
        tensors = iter(self.reads[node.name, index])
        operands = []
        for position, arg in enumerate(node.args):
            if isinstance(arg, Ref):
                operands.append(self._read(*next(tensors), node.name))
            else:
                kind = "bool" if node.op == "where" and position == 0 else dtype
                operands.append(self._constant(arg, _number_dtype(node, kind), "c"))
        return tuple(operands)

    def _compute_dtype(self, node: Node) -> str:
        assert node.spec is not None
        tensors = [self.values.spec(arg.name).dtype for arg in node.args if isinstance(arg, Ref)]
        if node.op == "where":
            return node.spec.dtype
        return tensors[0] if tensors else node.spec.dtype

    def _constant(self, value: Arg, dtype: str, name: str) -> str:
        assert isinstance(value, int | float | bool | Dim | Ratio)
        key = (dtype, repr(value))
        if key not in self.constants:
            self.constants[key] = self._emit(Constant(self._fresh(name), dtype, value))
        return self.constants[key]

    def _iota(self, node: Node, spec: TensorSpec, index: ElementIndex) -> str:
        """start + step·i, where i is the index of the only dimension."""
        start, step = node.args
        assert isinstance(start, int) and isinstance(step, int)
        unit = TensorSpec(spec.dtype, spec.shape, (Dim(step),))
        where = access(node.name, unit, index, self.domain.sizes)
        made = Index(self._fresh(node.name), spec.dtype, where.strides, (Dim(start), *where.offset))
        return self._emit(made)

    def _fresh(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.names:
            count += 1
            candidate = f"{name}_{count}"
        self.names.add(candidate)
        return candidate

    def _emit(self, item: Load | Constant | Index | Apply | Reduce | Scan) -> str:
        self.body.append(item)
        self.made[item.name] = item
        if isinstance(item, Reduce):
            self.made[item.second] = item
        return item.name


def _number_dtype(node: Node, dtype: str) -> str:
    """The type of a constant next to operands of `dtype`. 16-bit types compute in float32; for
    example, the count that a mean divides by has more digits than float16. Comparisons round, as
    eager mode does."""
    half = dtype in HALF_DTYPES and node.op not in (*_COMPARISONS, "where")
    return "float32" if half else dtype
