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
from fusewright.plan.assemble import assemble
from fusewright.plan.convolution_reductions import convolution_reduction
from fusewright.plan.convolutions import convolution_kernel, loses_by_reducing
from fusewright.plan.finish import kernel_of, step_of
from fusewright.plan.frames import NotFusibleError
from fusewright.plan.fuse import (
    EPILOGUE_APPLIES,
    Group,
    is_epilogue,
    makes_cycle,
    memory_readers,
    needed_views,
    orders_of_stores,
)
from fusewright.plan.logsumexps import LOGSUMEXP
from fusewright.plan.matmuls import matmul_kernel
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
    for node in values.graph.nodes[values.order[start] + 1 :]:
        if region.isdisjoint(node.refs()):
            continue
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
    taken: dict[str, Group] = {}
    rest = list(groups)
    for name in values.with_epilogue:
        while (found := _first_joined(values, name, taken, rest)) is not None:
            group, taken[name] = found
            rest.remove(group)
    return Epilogues(taken, tuple(rest))


def _first_joined(
    values: Values, name: str, taken: Mapping[str, Group], rest: list[Group]
) -> tuple[Group, Group] | None:
    """The first group that a matmul can fuse in addition, and its whole epilogue then."""
    here = Epilogues(taken, tuple(rest))
    own = here.unit(name)
    units = (*here.units, own)
    for group in rest:
        joined = _joined(values, taken.get(name), group)
        if joined is None or not can_be_epilogue(values, joined, name):
            continue
        others = tuple(each for each in rest if each is not group)
        if _gains_nothing(values, Epilogues({**taken, name: joined}, others), name):
            continue
        if not makes_cycle(values, units, own, group.items):
            return group, joined
    return None


def stored(values: Values, ended: Epilogues) -> Counter[str]:
    """Values that something outside their own group reads, with the number of readers. A matmul
    passes its result to its epilogue in registers."""
    read = Counter(memory_readers(values))
    for view in needed_views(values) - values.memory_views:
        read.update(values.nodes[view].refs())
    for group in ended.loops:
        read.update(set(group.assembled.loads) - set(group.items))
    for name, group in ended.of.items():
        read.update(set(group.assembled.loads) - {*group.items, name})
    return read


def _gains_nothing(values: Values, ended: Epilogues, name: str) -> bool:
    """Whether the reduction would gain nothing, for one of three reasons. The reduced value must be
    written anyway: reading it again from the cache mostly takes no longer (H200, batch norm and
    group norm: 0.99 to 1.11 of the time). Or the convolution would need a slower method. Or the
    epilogue ends in a logsumexp (linear layers of 4096 outputs: 1.2 to 1.3 of the time)."""
    group, node = ended.of[name], values.nodes[name]
    if values.target.fused_reductions or not group.has_reduction:
        return False
    if any(values.nodes[item].op == LOGSUMEXP for item in group.items):
        return True
    if node.op != CONVOLUTION:
        return False
    if loses_by_reducing(values, node):
        return True
    written = stored(values, ended).keys() & {name, *group.items}
    return any(values.spec(each).numel == values.spec(name).numel for each in written)


def _joined(values: Values, present: Group | None, group: Group) -> Group | None:
    """A matmul's epilogue joined with a group that reduces its result, if that is possible."""
    if present is None:
        return group
    disjoint = set(present.items).isdisjoint(group.assembled.loads)
    if present.has_reduction or not group.has_reduction or disjoint:
        return None
    items = tuple(sorted({*present.items, *group.items}, key=values.order.__getitem__))
    try:
        return Group(items, assemble(values, items, group.assembled.domain))
    except NotFusibleError:
        return None


def can_be_epilogue(values: Values, group: Group, name: str) -> bool:
    """Whether a group runs over the matmul's result and reads it at its own index."""
    kernel = kernel_of(group.assembled, "trial", "", group.items, values)
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
