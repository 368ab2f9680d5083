"""Epilogues of matmuls and convolutions: what each kernel writes, and what it fuses.

Pointwise operators after a matmul or convolution should run before its result is written. Before
fusion, `ends` finds the last value through which all uses of the result go; that value should be in
memory instead of the result. After fusion, `epilogues` gives each kernel at most one pointwise
group that reads its result, and one group that reduces it in a single sweep, by rows or by columns
(see `can_be_epilogue`; for convolutions see `convolution_reductions`). A convolution takes a
reduction only if nothing else reads the reduced value. In this module, "matmul" includes
convolutions.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from fusewright.cost.conv_staged import staged_spec
from fusewright.ir.epilogue import WithEpilogue
from fusewright.ir.graph import (
    HALF_DTYPES,
    ITEM_BYTES,
    Dim,
    Node,
    TensorSpec,
    contiguous_strides,
    product,
)
from fusewright.ir.loop import (
    Access,
    Apply,
    Argument,
    Axis,
    Instruction,
    Load,
    LoopKernel,
    Store,
)
from fusewright.plan.convolution_reductions import convolution_reduction
from fusewright.plan.convolutions import convolution_kernel, loses_by_reducing
from fusewright.plan.dependencies import Dependencies
from fusewright.plan.finish import kernel_of, step_of
from fusewright.plan.frames import NotFusibleError
from fusewright.plan.fuse import memory_readers, needed_views
from fusewright.plan.logsumexps import LOGSUMEXP
from fusewright.plan.matmuls import matmul_kernel
from fusewright.plan.merge import (
    EPILOGUE_APPLIES,
    Group,
    group_of,
    is_epilogue,
    orders_of_stores,
)
from fusewright.plan.names import epilogue_step_name, operators_of
from fusewright.plan.rows import order_of
from fusewright.plan.staged_pairs import StagedPair
from fusewright.plan.steps import Fused
from fusewright.plan.values import Values, is_pointwise
from fusewright.rewrite.layouts import CONVOLUTION, is_channels_last
from fusewright.rewrite.padding import PAD


def ends(values: Values) -> dict[str, str]:
    """From the last value that all readers of a matmul can use to that matmul, if there is one."""
    found = {_end(values, name): name for name in values.with_epilogue}
    return {end: name for end, name in found.items() if end is not None}


def _end(values: Values, start: str) -> str | None:
    """Walk forward; the end is the last node that alone is read outside the region."""
    shape, transposes = values.spec(start).shape, start in values.convolutions
    region, applies, end = {start}, 0, None
    for node in _readers_of(values, region):
        if not _same_points(node, shape) or (transposes and _is_transposed(values, node)):
            break
        region.add(node.name)
        applies += is_pointwise(node)
        if applies > EPILOGUE_APPLIES:
            break
        live = [name for name in region if _is_read(values, name, region)]
        if live == [node.name] and is_pointwise(node):
            end = node.name
    return end


def _readers_of(values: Values, region: set[str]) -> Iterator[Node]:
    """The nodes that read a value of the region, in the graph's order, while the region grows by
    them."""
    seen, open_ = set(region), list(region)
    waiting: list[tuple[int, str]] = []
    while open_ or waiting:
        for user in (user for name in open_ for user in values.users[name]):
            if user.name not in seen:
                seen.add(user.name)
                heapq.heappush(waiting, (values.order[user.name], user.name))
        if not waiting:
            return
        _, name = heapq.heappop(waiting)
        yield values.nodes[name]
        open_ = [name] if name in region else []


def _is_transposed(values: Values, node: Node) -> bool:
    """Whether it copies to channels-last. A convolution's epilogue has neighbouring positions, so
    its result is best written in that order."""
    if node.op != "cast" or not is_channels_last(values.spec(node.name)):
        return False
    return not is_channels_last(values.spec(node.refs()[0]))


def _is_read(values: Values, name: str, region: set[str]) -> bool:
    return name in values.outputs or any(user.name not in region for user in values.users[name])


def _same_points(node: Node, shape: tuple[Dim, ...]) -> bool:
    """Whether a node has the matmul's rows and columns, in the same order."""
    if node.spec is None or not node.spec.shape:
        return False
    small = node.spec.dtype in ITEM_BYTES and ITEM_BYTES[node.spec.dtype] <= ITEM_BYTES["float32"]
    kind = (is_pointwise(node) and node.op != PAD) or node.op == "aten.view.default"
    return kind and small and node.spec.shape[-1] == shape[-1] and node.spec.numel == product(shape)


@dataclass(frozen=True)
class Epilogues:
    """The group that each matmul fuses, and the groups that stay loops.

    A matmul's group may be one that `epilogues` has joined of two.
    """

    of: Mapping[str, Group]
    loops: tuple[Group, ...]

    @property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """The values that are computed together, unit by unit."""
        return (*(group.items for group in self.loops), *map(self.unit, self.of))

    def unit(self, matmul: str) -> tuple[str, ...]:
        """The values that are computed together with a matmul, itself first."""
        return (matmul, *(self.of[matmul].items if matmul in self.of else ()))


def epilogues(values: Values, groups: tuple[Group, ...]) -> Epilogues:
    """Give each matmul the first group that can be its epilogue, and a reduction of that group."""
    if not values.with_epilogue:
        return Epilogues({}, groups)
    taking = _Taking(values, groups)
    for name in values.with_epilogue:
        while taking.take_first(name):
            pass
    return Epilogues(taking.taken, tuple(taking.rest.values()))


class _Taking:
    """The groups that matmuls have taken, and those that are left, by their place."""

    def __init__(self, values: Values, groups: tuple[Group, ...]) -> None:
        self.values = values
        self.taken: dict[str, Group] = {}
        self.rest = dict(enumerate(groups))
        self._dependencies = Dependencies(values, [group.items for group in groups])
        self._taker: dict[int, str] = {}
        self._readers: dict[str, list[int]] = {}
        for place, group in self.rest.items():
            for name in group.assembled.loads:
                self._readers.setdefault(name, []).append(place)
        self._in_memory = {*memory_readers(values), *_read_by_views(values)}

    def take_first(self, name: str) -> bool:
        """Give a matmul the first group that it can fuse in addition, if there is one."""
        present = self.taken.get(name)
        for place in self._candidates(name):
            group = self.rest[place]
            joined = _joined(self.values, present, group)
            if joined is None or not can_be_epilogue(self.values, joined, name):
                continue
            if self._gains_nothing(joined, name, place):
                continue
            if not self._dependencies.makes_cycle(name, group.items[0]):
                self._dependencies.join(name, group.items[0])
                self.taken[name], self._taker[place] = joined, name
                del self.rest[place]
                return True
        return False

    def _candidates(self, name: str) -> list[int]:
        """The groups that read the matmul's result or its epilogue's, in their order."""
        read = self.taken[name].items if name in self.taken else (name,)
        found = {place for each in read for place in self._readers.get(each, ())}
        return sorted(found & self.rest.keys())

    def _gains_nothing(self, group: Group, name: str, place: int) -> bool:
        """Whether the reduction would gain nothing, for one of three reasons. The reduced value
        must be written anyway: reading it again from the cache mostly takes no longer (H200, batch
        norm and group norm: 0.99 to 1.11 of the time). Or the convolution would need a slower
        method. Or the epilogue ends in a logsumexp (linear layers of 4096 outputs: 1.2 to 1.3 of
        the time)."""
        values, node = self.values, self.values.nodes[name]
        if values.target.fused_reductions or not group.has_reduction:
            return False
        if any(values.nodes[item].op == LOGSUMEXP for item in group.items):
            return True
        if node.op != CONVOLUTION:
            return False
        if loses_by_reducing(values, node):
            return True
        whole = values.spec(name).numel
        large = (each for each in (name, *group.items) if values.spec(each).numel == whole)
        return any(self._is_written(each, name, place) for each in large)

    def _is_written(self, value: str, name: str, place: int) -> bool:
        """Whether something else reads a value of a matmul that takes the group at `place`."""
        readers = (at for at in self._readers.get(value, ()) if at != place)
        return value in self._in_memory or any(self._taker.get(at) != name for at in readers)


def stored(values: Values, ended: Epilogues) -> Counter[str]:
    """Values that something outside their own group reads, with the number of readers. A matmul
    passes its result to its epilogue in registers."""
    read = Counter(memory_readers(values))
    read.update(_read_by_views(values))
    for group in ended.loops:
        read.update(set(group.assembled.loads) - set(group.items))
    for name, group in ended.of.items():
        read.update(set(group.assembled.loads) - {*group.items, name})
    return read


def _read_by_views(values: Values) -> Iterator[str]:
    for view in needed_views(values) - values.memory_views:
        yield from values.nodes[view].refs()


def _joined(values: Values, present: Group | None, group: Group) -> Group | None:
    """A matmul's epilogue joined with a group that reduces its result, if that is possible."""
    if present is None:
        return group
    disjoint = set(present.items).isdisjoint(group.assembled.loads)
    if present.has_reduction or not group.has_reduction or disjoint:
        return None
    items = tuple(sorted({*present.items, *group.items}, key=values.order.__getitem__))
    try:
        return group_of(values, items, group.assembled.domain)
    except NotFusibleError:
        return None


def can_be_epilogue(values: Values, group: Group, name: str) -> bool:
    """Whether a group runs over the matmul's result and reads it at its own index."""
    kernel = group.kernel
    reads = [i for i in kernel.body if isinstance(i, Load) and i.access.buffer == name]
    if len(reads) != 1 or not is_epilogue(kernel):
        return False
    if kernel.inner and name in values.convolutions:
        allowed = reads[0].access.offset == ()
        return allowed and convolution_reduction(kernel, name, values.spec(name).shape) is not None
    rows = {order_of(kernel, reads[0].access)}
    if name in values.convolutions and orders_of_stores(kernel) != rows:
        return False
    return any(
        reads[0].access == Access(name, strides)
        for strides in _own_strides(kernel, values.spec(name).shape[-1], values.spec(name).numel)
    )


def _own_strides(kernel: LoopKernel, columns: Dim, elements: Dim) -> Iterator[tuple[Dim, ...]]:
    """The strides of a result along the kernel's axes, for each allowed order: columns are the last
    outer axis, or the only reduced one."""
    outer, inner = (tuple(axis.size for axis in axes) for axes in (kernel.outer, kernel.inner))
    if product((*outer, *inner)) != elements or len((*outer, *inner)) < 2 or not outer:
        return  # tiles need more than a single row
    if outer[-1:] == (columns,) and (not inner or len(outer) == 1):
        *rest, column = contiguous_strides((*inner, *outer))
        yield (*rest, column) if not inner else (column, *rest)
    if inner == (columns,):
        yield contiguous_strides((*outer, *inner))


def ended_step(
    values: Values,
    node: Node,
    group: Group | None,
    written: Collection[str],
    prologue: LoopKernel | None = None,
    pair: StagedPair | None = None,
) -> Fused:
    """The step of one matmul or convolution; `written` are the values that others read."""
    if group is None:
        epilogue = _copied(values, node.name)
        outputs: tuple[str, ...] = (node.name,)
    else:
        outputs = tuple(item for item in group.items if item in written)
        epilogue = kernel_of(group.assembled, "kernel", "", outputs, values)
        if epilogue.inner and node.op == CONVOLUTION:
            epilogue = _over_its_axes(values, node.name, epilogue)
        if node.name in written:
            epilogue = _also_stored(epilogue, node.name)
            outputs = (*outputs, node.name)
    kernel, staged = _kernel(values, node, epilogue, prologue, pair)
    before = operators_of(prologue) if prologue is not None else ()
    operators = (*before, kernel.operator, *operators_of(epilogue))
    kernel = replace(kernel, name=epilogue_step_name(operators), summary=" → ".join(operators))
    return step_of(kernel, outputs, operators, values, staged)


def _over_its_axes(values: Values, name: str, epilogue: LoopKernel) -> LoopKernel:
    reduced = convolution_reduction(epilogue, name, values.spec(name).shape)
    assert reduced is not None, f"{name} was given a reduction that it cannot compute"
    return reduced


def _kernel(
    values: Values,
    node: Node,
    epilogue: LoopKernel,
    prologue: LoopKernel | None,
    pair: StagedPair | None,
) -> tuple[WithEpilogue, tuple[tuple[str, TensorSpec], ...]]:
    """The kernel, and the staged input that it leaves for another one."""
    given = _given(epilogue, node.name).name
    if node.op != CONVOLUTION:
        return matmul_kernel(values, node, epilogue, given), ()
    kernel = convolution_kernel(values, node, epilogue, given, prologue, pair)
    if pair is None:
        return kernel, ()
    return kernel, ((pair.staged, staged_spec(kernel.walked, values.spec(node.name).device)),)


def _given(epilogue: LoopKernel, name: str) -> Load:
    return next(i for i in epilogue.body if isinstance(i, Load) and i.access.buffer == name)


def _copied(values: Values, name: str) -> LoopKernel:
    """The epilogue that stores a matmul's result unchanged."""
    spec = values.spec(name)
    axes = tuple(Axis(f"i{at}", size) for at, size in enumerate(spec.shape))
    where = Access(name, spec.strides)
    body = (Load(name, spec.dtype, where), Store(name, spec.dtype, where))
    arguments = (Argument(name, spec.dtype, True),)
    return LoopKernel("kernel", "", axes, (), arguments, tuple(sorted(values.sizes)), body)


def _also_stored(epilogue: LoopKernel, name: str) -> LoopKernel:
    """Also store the matmul's own result; the rest of the epilogue uses it as rounded in memory."""
    load = _given(epilogue, name)
    given: tuple[Instruction, ...] = (load,)
    if load.dtype in HALF_DTYPES:
        exact = replace(load, name=f"{load.name}_exact")
        given = (exact, Apply(load.name, load.dtype, "cast", (exact.name,)))
    at = epilogue.body.index(load)
    store = Store(load.name, load.dtype, load.access)
    arguments = [each for each in epilogue.arguments if each.name != name]
    return replace(
        epilogue,
        arguments=(*arguments, Argument(name, load.dtype, True)),
        body=(*epilogue.body[:at], *given, *epilogue.body[at + 1 :], store),
    )
