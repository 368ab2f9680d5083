"""Products and windows: what each writes, and the epilogue that it takes up.

Both are called products here: a window is one, of taps and positions. Whatever follows a product,
point by point, is worth doing before its result is written. `ends`
finds, before fusion, the value through which everything passes that is made of a product: that is
what should be in memory instead of the product. After fusion `epilogues` gives each product at
most one pointwise group that reads it, and one that reduces what comes of it in a single sweep, by
rows or by columns (`ends_product`; what that means for a window is in `window_sweeps`). A window
does so where nothing else reads what it reduces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fusewright.ir.convolution import WindowKernel
from fusewright.ir.graph import HALVES, ITEM_BYTES, ONE, Dim, Node, contiguous_strides, product
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
from fusewright.ir.matmul import ProductKernel
from fusewright.plan.assemble import assemble
from fusewright.plan.convolution_reductions import window_sweep
from fusewright.plan.convolutions import loses_by_reducing, window_kernel
from fusewright.plan.cost import ended_bytes, ended_operations
from fusewright.plan.finish import kernel_of
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
from fusewright.plan.matmuls import product_kernel
from fusewright.plan.names import operators_of
from fusewright.plan.rows import order_of
from fusewright.plan.staged_pairs import LinePair
from fusewright.plan.steps import Ended, Product, Window
from fusewright.plan.values import Values, is_pointwise
from fusewright.rewrite.layouts import WINDOW, is_channels_last
from fusewright.rewrite.padding import PAD


def ends(values: Values) -> dict[str, str]:
    """The last value that all readers of a product can do with, where there is one, and whose."""
    found = {_end(values, name): name for name in values.products}
    return {end: name for end, name in found.items() if end is not None}


def _end(values: Values, start: str) -> str | None:
    """Walks on while all that is still read of the product's region is a single value."""
    shape, turns = values.spec(start).shape, start in values.windows
    region, applies, end = {start}, 0, None
    for node in values.graph.nodes[values.order[start] + 1 :]:
        if region.isdisjoint(node.refs()):
            continue
        if not _same_points(node, shape) or (turns and _is_turned(values, node)):
            break
        region.add(node.name)
        applies += is_pointwise(node)
        if applies > EPILOGUE_APPLIES:
            break
        live = [name for name in region if _is_read(values, name, region)]
        if live == [node.name] and is_pointwise(node):
            end = node.name
    return end


def _is_turned(values: Values, node: Node) -> bool:
    """Whether it is a copy in channels-last: a window's positions go through its epilogue side by
    side, and so they are best written."""
    if node.op != "cast" or not is_channels_last(values.spec(node.name)):
        return False
    return not is_channels_last(values.spec(node.refs()[0]))


def _is_read(values: Values, name: str, region: set[str]) -> bool:
    return name in values.outputs or any(user.name not in region for user in values.users[name])


def _same_points(node: Node, shape: tuple[Dim, ...]) -> bool:
    """Whether a node has the product's rows and columns, in their order."""
    if node.spec is None or not node.spec.shape:
        return False
    small = node.spec.dtype in ITEM_BYTES and ITEM_BYTES[node.spec.dtype] <= ITEM_BYTES["float32"]
    kind = (is_pointwise(node) and node.op != PAD) or node.op == "aten.view.default"
    return kind and small and node.spec.shape[-1] == shape[-1] and node.spec.numel == product(shape)


@dataclass(frozen=True)
class Epilogues:
    """Which group each product takes up, and the groups that stay loops.

    A product's own may be a group that `epilogues` has joined of two.
    """

    of: Mapping[str, Group]
    loops: tuple[Group, ...]

    @property
    def places(self) -> tuple[tuple[str, ...], ...]:
        """The values that are computed together."""
        return (*(group.items for group in self.loops), *map(self.place, self.of))

    def place(self, product: str) -> tuple[str, ...]:
        """What is computed together with a product, itself first."""
        return (product, *(self.of[product].items if product in self.of else ()))


def epilogues(values: Values, groups: tuple[Group, ...]) -> Epilogues:
    """Give each product the first group that it can end in, and a reduction of that."""
    taken: dict[str, Group] = {}
    rest = list(groups)
    for name in values.products:
        while (found := _first_joined(values, name, taken, rest)) is not None:
            group, taken[name] = found
            rest.remove(group)
    return Epilogues(taken, tuple(rest))


def _first_joined(
    values: Values, name: str, taken: Mapping[str, Group], rest: list[Group]
) -> tuple[Group, Group] | None:
    """The first group that a product can take up beside what it has, and what it has then."""
    here = Epilogues(taken, tuple(rest))
    own = here.place(name)
    places = (*here.places, own)
    for group in rest:
        joined = _joined(values, taken.get(name), group)
        if joined is None or not ends_product(values, joined, name):
            continue
        others = tuple(each for each in rest if each is not group)
        if _sweeps_in_vain(values, Epilogues({**taken, name: joined}, others), name):
            continue
        if not makes_cycle(values, places, own, group.items):
            return group, joined
    return None


def stored(values: Values, ended: Epilogues) -> Counter[str]:
    """Values that something outside their own group reads, and how many do; a product gives its
    epilogue its own."""
    read = Counter(memory_readers(values))
    for view in needed_views(values) - values.memory_views:
        read.update(values.nodes[view].refs())
    for group in ended.loops:
        read.update(set(group.assembled.loads) - set(group.items))
    for name, group in ended.of.items():
        read.update(set(group.assembled.loads) - {*group.items, name})
    return read


def _sweeps_in_vain(values: Values, ended: Epilogues, name: str) -> bool:
    """Whether a window would reduce what it has to write all the same: to read that again, from the
    cache, mostly takes no longer (H200, batch norm and group norm: 0.99 to 1.11 of the time). Or
    whether it would have to go about it in a slower way; so does whatever ends in a logsumexp
    (linear layers of 4096 results: 1.2 to 1.3 of the time)."""
    group, node = ended.of[name], values.nodes[name]
    if values.sweeping or not group.has_reduction:
        return False
    if any(values.nodes[item].op == LOGSUMEXP for item in group.items):
        return True
    if node.op != WINDOW:
        return False
    if loses_by_reducing(values, node):
        return True
    written = stored(values, ended).keys() & {name, *group.items}
    return any(values.spec(each).numel == values.spec(name).numel for each in written)


def _joined(values: Values, ending: Group | None, group: Group) -> Group | None:
    """A product's epilogue with a group that reduces what it leaves, if they go together."""
    if ending is None:
        return group
    apart = set(ending.items).isdisjoint(group.assembled.loads)
    if ending.has_reduction or not group.has_reduction or apart:
        return None
    items = tuple(sorted({*ending.items, *group.items}, key=values.order.__getitem__))
    try:
        return Group(items, assemble(values, items, group.assembled.domain))
    except NotFusibleError:
        return None


def ends_product(values: Values, group: Group, name: str) -> bool:
    """Whether a group runs over the product's result and reads it at its own index."""
    kernel = kernel_of(group.assembled, "trial", "", group.items, values)
    reads = [i for i in kernel.body if isinstance(i, Load) and i.access.buffer == name]
    if len(reads) != 1 or not is_epilogue(kernel):
        return False
    if kernel.inner and name in values.windows:
        allowed = reads[0].access.offset == ()
        return allowed and window_sweep(kernel, name, values.spec(name).shape) is not None
    rows = {order_of(kernel, reads[0].access)}
    if name in values.windows and orders_of_stores(kernel) != rows:
        return False
    return any(
        reads[0].access == Access(name, strides)
        for strides in _own_strides(kernel, values.spec(name).shape[-1], values.spec(name).numel)
    )


def _own_strides(kernel: LoopKernel, columns: Dim, elements: Dim) -> Iterator[tuple[Dim, ...]]:
    """The strides of a result along the kernel's axes, for each order in which it may have them:
    columns are its last outer axis, or the only one that it reduces."""
    outer, inner = (tuple(axis.size for axis in axes) for axes in (kernel.outer, kernel.inner))
    if product((*outer, *inner)) != elements or len((*outer, *inner)) < 2 or not outer:
        return  # a single row is no business of tiles
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
    pair: LinePair | None = None,
) -> Ended:
    """The step of one product or window; `written` are the values that others read."""
    if group is None:
        epilogue = _copied(values, node.name)
        outputs: tuple[str, ...] = (node.name,)
    else:
        outputs = tuple(item for item in group.items if item in written)
        epilogue = kernel_of(group.assembled, "kernel", "", outputs, values)
        if epilogue.inner and node.op == WINDOW:
            epilogue = _swept(values, node.name, epilogue)
        if node.name in written:
            epilogue = _also_stored(epilogue, node.name)
            outputs = (*outputs, node.name)
    kernel = _kernel(values, node, epilogue, prologue, pair)
    outputs = (*outputs, pair.lines) if pair is not None else outputs
    before = operators_of(prologue) if prologue is not None else ()
    inputs = tuple(each.name for each in kernel.arguments if not each.is_output)
    operators = (*before, _word(kernel), *operators_of(epilogue))
    parts: dict[str, Any] = {
        "name": "",
        "inputs": inputs,
        "outputs": outputs,
        "operators": operators,
        "bytes_moved": ended_bytes(kernel, values.sizes, {x: values.bytes_of(x) for x in inputs}),
        "operations": ended_operations(kernel, values.sizes),
    }
    summary = " → ".join(operators)
    if isinstance(kernel, WindowKernel):
        return Window(kernel=replace(kernel, summary=summary), **parts)
    return Product(kernel=replace(kernel, summary=summary), **parts)


def _swept(values: Values, name: str, epilogue: LoopKernel) -> LoopKernel:
    sweep = window_sweep(epilogue, name, values.spec(name).shape)
    assert sweep is not None, f"{name} was given a reduction that it cannot end in"
    return sweep


def _word(kernel: ProductKernel | WindowKernel) -> str:
    if isinstance(kernel, WindowKernel):
        return "convolution"
    return "mm" if kernel.batches == ONE else "bmm"


def _kernel(
    values: Values,
    node: Node,
    epilogue: LoopKernel,
    prologue: LoopKernel | None,
    pair: LinePair | None,
) -> ProductKernel | WindowKernel:
    given = _given(epilogue, node.name).name
    if node.op == WINDOW:
        return window_kernel(values, node, epilogue, given, prologue, pair)
    return product_kernel(values, node, epilogue, given)


def _given(epilogue: LoopKernel, name: str) -> Load:
    return next(i for i in epilogue.body if isinstance(i, Load) and i.access.buffer == name)


def _copied(values: Values, name: str) -> LoopKernel:
    """The epilogue of a product that is written as it is."""
    spec = values.spec(name)
    axes = tuple(Axis(f"i{at}", size) for at, size in enumerate(spec.shape))
    where = Access(name, spec.strides)
    body = (Load(name, spec.dtype, where), Store(name, spec.dtype, where))
    arguments = (Argument(name, spec.dtype, True),)
    return LoopKernel("kernel", "", axes, (), arguments, tuple(sorted(values.sizes)), body)


def _also_stored(epilogue: LoopKernel, name: str) -> LoopKernel:
    """With the product itself as an output; the rest then computes with it as it is in memory."""
    load = _given(epilogue, name)
    given: tuple[Instruction, ...] = (load,)
    if load.dtype in HALVES:
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
