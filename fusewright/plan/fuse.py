"""Which values share a kernel: every item starts alone, then groups merge while that is legal.

A merge saves memory traffic, so any legal one is taken: producers into consumers first, then groups
that read the same tensors. A merge is legal if the group has one iteration space, reads no value at
an index other than its own, and makes no cycle through another group or a call. Elements may read a
reduction of the same group only if rows can be held close (see `holds_rows`). A scan shares a
kernel with what is read and computed along its axis, and with nothing that needs its last value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fusewright.ir.graph import Node
from fusewright.ir.loop import Apply, Load, LoopKernel, Store, level, scans
from fusewright.plan.assemble import Assembled, assemble
from fusewright.plan.domain import Domain, point_domain, reduction_domain, scan_domain
from fusewright.plan.finish import kernel_of
from fusewright.plan.frames import NotFusibleError
from fusewright.plan.overlaps import read_often
from fusewright.plan.rows import holds_rows, holds_whole_columns, order_of
from fusewright.plan.values import Values, is_pointwise, is_scan, is_view
from fusewright.schedule.sweeps import is_one_scan, part_bytes, sweeps

MAX_ROUNDS = 8
# An epilogue runs in the registers that the accumulators leave.
EPILOGUE_APPLIES = 60
# Of a reduction's partial result: a warpgroup exchanges these in 8.5 KB of shared memory.
EPILOGUE_PART_BYTES = 32
EPILOGUE_LOADS = 9  # the matmul's result included

Items = tuple[str, ...]


@dataclass(frozen=True)
class Group:
    items: Items
    assembled: Assembled

    @property
    def has_reduction(self) -> bool:
        return bool(self.assembled.domain.reduced_axes)


def fuse(values: Values) -> tuple[Values, tuple[Group, ...]]:
    """The groups of a graph, and `values` with the decision what is in memory."""
    wanted = _must_be_stored(values) | _row_results(values) | frozenset(values.ends)
    values = replace(values, realised=wanted)
    values = replace(values, realised=wanted | read_often(values))
    for _ in range(MAX_ROUNDS):
        values, singles = _singles(values)
        groups = _merged(values, singles)
        shared = _worth_storing(values, groups)
        if not shared:
            break
        values = replace(values, realised=values.realised | shared)
    return values, tuple(groups)


# Values in memory -------------------------------------------------------------------------------


def memory_readers(values: Values) -> Iterator[str]:
    """Values that PyTorch reads: graph outputs, operands of calls, sources of memory views."""
    yield from (name for name in values.graph.outputs if isinstance(name, str))
    for node in values.graph.nodes:
        if not values.is_item(node.name) and not (
            is_view(node) and node.name not in values.memory_views
        ):
            yield from node.refs()


def needed_views(values: Values) -> frozenset[str]:
    """Canonical views that PyTorch must take, with the views beneath them."""
    found: set[str] = set()
    for name in memory_readers(values):
        while name in values.nodes and is_view(values.nodes[name]):
            found.add(name)
            name = values.nodes[name].refs()[0]
    return frozenset(found) | values.memory_views


def _must_be_stored(values: Values) -> frozenset[str]:
    found: set[str] = set()
    for name in memory_readers(values):
        while name in values.nodes and is_view(values.nodes[name]):
            name = values.nodes[name].refs()[0]
        if values.is_item(name):
            found.add(name)
    own = (n for n in values.graph.nodes if is_scan(n) or values.reduction_of(n.name) is not None)
    picked = (node.name for node in own if node.op != "reduce_welford")
    return frozenset(found) | frozenset(picked)


def _row_results(values: Values) -> frozenset[str]:
    """Small results of reductions that larger values read: computed once, not for every element."""
    after: set[str] = set()
    found: set[str] = set()
    for node in values.graph.nodes:
        sources = [name for name in node.refs() if name in values.nodes]
        follows = any(name in after for name in sources)
        if values.reduction_of(node.name) is not None or (
            follows and (is_pointwise(node) or is_view(node))
        ):
            after.add(node.name)
        if node.spec is None or not is_pointwise(node):
            continue
        for name in sources:
            base = _through_views(values, name)
            small = values.bytes_of(base) * 4 <= values.bytes_of(node.name)
            if small and base in after and is_pointwise(values.nodes[base]):
                found.add(base)
    return frozenset(found)


def _through_views(values: Values, name: str) -> str:
    while name in values.nodes and is_view(values.nodes[name]):
        name = values.nodes[name].refs()[0]
    return name


def _worth_storing(values: Values, groups: list[Group]) -> frozenset[str]:
    """Values that several groups compute, if storing them once would save more bytes of reads."""
    holders: dict[str, list[Group]] = {}
    for group in groups:
        for name in group.assembled.inlined:
            holders.setdefault(name, []).append(group)
    found = set()
    for name, sharing in holders.items():
        node = values.nodes.get(name)
        if len(sharing) < 2 or node is None or not is_pointwise(node) or not node.refs():
            continue
        if name in values.realised or len(values.users[name]) < 2:
            continue
        stored = replace(values, realised=values.realised | {name})
        saved = sorted(_bytes_saved(stored, group) for group in sharing)
        # The group that gains least from the stored value computes and stores it.
        if sum(saved[1:]) > values.bytes_of(name):
            found.add(name)
    return frozenset(found)


def _bytes_saved(stored: Values, group: Group) -> int:
    """How many bytes less a group reads once a value is in memory."""
    try:
        after = assemble(stored, group.items, group.assembled.domain)
    except NotFusibleError:
        return 0
    before = sum(stored.bytes_of(name) for name in group.assembled.loads)
    return before - sum(stored.bytes_of(name) for name in after.loads)


# Groups --------------------------------------------------------------------------------------


def _singles(values: Values) -> tuple[Values, list[Group]]:
    """One group per item; views that index arithmetic cannot follow go to memory on the way."""
    while True:
        groups: list[Group] = []
        try:
            for items in _units(values):
                groups.append(Group(items, assemble(values, items, _domain(values, items[0]))))
            return values, groups
        except NotFusibleError as reason:
            if reason.culprit is None:
                raise
            views = values.memory_views | {reason.culprit}
            values = replace(values, memory_views=frozenset(views))
            values = replace(values, realised=values.realised | _must_be_stored(values))


def _units(values: Values) -> Iterator[tuple[str, ...]]:
    """Items that cannot be separated: the results of one welford reduction, or a single value."""
    done: set[str] = set()
    for name in sorted(values.realised, key=values.order.__getitem__):
        if name in done:
            continue
        reduction = values.reduction_of(name)
        unit: tuple[str, ...] = (name,)
        if reduction is not None and reduction.op == "reduce_welford":
            unit = tuple(each for each in values.realised if values.reduction_of(each) is reduction)
            unit = tuple(sorted(unit, key=values.order.__getitem__))
        done.update(unit)
        yield unit


def _domain(values: Values, item: str) -> Domain:
    reduction = values.reduction_of(item)
    if reduction is not None:
        return reduction_domain(values, reduction)
    if is_scan(values.nodes[item]):
        return scan_domain(values, values.nodes[item])
    return point_domain(values.spec(item).shape)


def _merged(values: Values, groups: list[Group]) -> list[Group]:
    changed = True
    refused: set[tuple[Items, Items, str]] = set()
    while changed:
        changed = False
        for first, second, shared in _candidates(values, groups):
            key = (first.items, second.items, shared)
            if key in refused:
                continue
            both = _merge(values, groups, first, second, shared)
            if both is None:
                refused.add(key)
                continue
            position = groups.index(first)
            groups = [g for g in groups if g is not first and g is not second]
            groups.insert(min(position, len(groups)), both)
            changed = True
            break
    return groups


def _candidates(values: Values, groups: list[Group]) -> Iterator[tuple[Group, Group, str]]:
    """Pairs to try: producer and consumer, then readers of the same tensor, with its name."""
    home = {item: group for group in groups for item in group.items}
    for group in groups:
        for name in group.assembled.loads:
            if name in home and home[name] is not group:
                yield home[name], group, ""
    readers: dict[str, list[Group]] = {}
    for group in groups:
        for name in group.assembled.loads:
            readers.setdefault(name, []).append(group)
    for name, sharing in readers.items():
        size = values.bytes_of(name)
        for position, first in enumerate(sharing):
            for second in sharing[position + 1 :]:
                if size * 2 >= max(_largest(values, first), _largest(values, second)):
                    yield first, second, name


def _largest(values: Values, group: Group) -> int:
    return max((values.bytes_of(name) for name in group.assembled.loads), default=0)


def _merge(
    values: Values, groups: list[Group], first: Group, second: Group, shared: str
) -> Group | None:
    """Two groups as one; the tensor that they share must be read in one way."""
    items = tuple(sorted({*first.items, *second.items}, key=values.order.__getitem__))
    domain = _common_domain(first, second)
    units = (group.items for group in groups)
    if domain is None or makes_cycle(values, units, first.items, second.items):
        return None
    try:
        assembled = assemble(values, items, domain)
    except NotFusibleError:
        return None
    merged = Group(items, assembled)
    kernel = kernel_of(assembled, "trial", "", items, values)
    if shared and _ways(kernel, shared) >= sum(
        _ways(kernel_of(each.assembled, "trial", "", each.items, values), shared)
        for each in (first, second)
    ):
        return None
    if scans(kernel):
        if not is_one_scan(kernel):
            return None
    elif _reads_rows_again(kernel) and not (
        holds_rows(values, kernel) or holds_whole_columns(values, kernel)
    ):
        return None
    if values.ends.keys() & set(items) and not _ends_one_matmul(values, items, kernel):
        return None
    return merged


def _ways(kernel: LoopKernel, buffer: str) -> int:
    """In how many orders a tensor is read. Each order is a read of its own, and at most one of them
    is the order in memory."""
    loads = [item for item in kernel.body if isinstance(item, Load)]
    return len({item.access.strides for item in loads if item.access.buffer == buffer})


def _ends_one_matmul(values: Values, items: tuple[str, ...], kernel: LoopKernel) -> bool:
    """Whether a group that should be an epilogue still can be one. Reductions join it later, if
    they find nothing better."""
    ended = [values.ends[item] for item in items if item in values.ends]
    if len(ended) != 1 or kernel.inner or not is_epilogue(kernel):
        return False
    return ended[0] not in values.convolutions or len(orders_of_stores(kernel)) == 1


def orders_of_stores(kernel: LoopKernel) -> set[tuple[int, ...]]:
    """The orders of axes in which neighbours are written. A convolution's epilogue has neighbouring
    positions; a store by channels would scatter them (H200, 64 channels of 16×56²: 77 instead of 20
    µs, and a copy takes 9)."""
    return {order_of(kernel, item.access) for item in kernel.body if isinstance(item, Store)}


def is_epilogue(kernel: LoopKernel) -> bool:
    """Whether a kernel fits into the registers that a matmul leaves: it is short, reduces in at
    most one sweep, and has small partial results."""
    plan = sweeps(kernel)
    if plan.count > 1 or (kernel.inner and part_bytes(plan) > EPILOGUE_PART_BYTES):
        return False
    if any(isinstance(item, Load) and item.access.guards for item in kernel.body):
        return False
    applies = sum(isinstance(item, Apply) for item in kernel.body)
    loads = {item.access.buffer for item in kernel.body if isinstance(item, Load)}
    return applies <= EPILOGUE_APPLIES and len(loads) <= EPILOGUE_LOADS


def _common_domain(first: Group, second: Group) -> Domain | None:
    """The iteration space of the group that reduces; two pointwise groups need equal sizes."""
    left, right = first.assembled.domain, second.assembled.domain
    if left.reduced_axes:
        return left
    if right.reduced_axes:
        return right
    if left.numel != right.numel:
        return None
    return left if len(left.sizes) >= len(right.sizes) else right


def makes_cycle(values: Values, units: Iterable[Items], first: Items, second: Items) -> bool:
    """Whether a path leads out of the pair, through something else, and back in.

    `units` are the values that are computed together, the pair's included.
    """
    owner: dict[str, int] = {}
    for number, items in enumerate(units):
        inside = 0 if items in (first, second) else number + 1
        owner.update((item, inside) for item in items)
    reached: set[object] = set()
    frontier: list[object] = []
    for name in (*first, *second):
        for follower in _followers(values, name, owner):
            if follower != 0 and follower not in reached:
                reached.add(follower)
                frontier.append(follower)
    members: dict[object, list[str]] = {}
    for item, number in owner.items():
        members.setdefault(number, []).append(item)
    while frontier:
        step = frontier.pop()
        names = members.get(step, [step] if isinstance(step, str) else [])
        for name in names:
            for follower in _followers(values, name, owner):
                if follower == 0:
                    return True
                if follower not in reached:
                    reached.add(follower)
                    frontier.append(follower)
    return False


def _followers(values: Values, name: str, owner: dict[str, int]) -> Iterator[object]:
    """The next steps that read a value: groups by number, everything else by its node's name."""
    frontier = [name]
    seen: set[str] = set()
    while frontier:
        for user in values.followers(frontier.pop()):
            if user.name in owner:
                yield owner[user.name]
            elif not _is_transparent(values, user):
                yield user.name
            elif user.name not in seen:
                seen.add(user.name)
                frontier.append(user.name)


def _is_transparent(values: Values, node: Node) -> bool:
    """Whether a node is part of the loop that reads it, rather than a step of its own."""
    followed = is_view(node) and node.name not in values.memory_views
    return followed or is_pointwise(node) or node.op == "reduce_welford"


def _reads_rows_again(kernel: LoopKernel) -> bool:
    """Whether an element value depends on a reduction of the same kernel."""
    return level(kernel).phases > 1
