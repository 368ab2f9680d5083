"""Matrix products of ours: what each writes, and the epilogue that it takes up.

Whatever follows a product, point by point, is worth doing before its result is written. `ends`
finds, before fusion, the value through which everything passes that is made of a product: that is
what should be in memory instead of the product. After fusion `epilogues` gives each product at
most one pointwise group that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusewright.ir import (
    ITEM_BYTES,
    ONE,
    ZERO,
    Dim,
    Node,
    contiguous_strides,
    product,
)
from fusewright.loop import Access, Apply, Argument, Axis, Load, LoopKernel, Store
from fusewright.plan.assemble import kernel_of
from fusewright.plan.cost import product_bytes, product_operations
from fusewright.plan.fuse import EPILOGUE_APPLIES, Group, is_epilogue, makes_cycle
from fusewright.plan.steps import Product
from fusewright.plan.values import Values, is_pointwise
from fusewright.product import ProductKernel, RawOperand, SplitOperand
from fusewright.rewrite.products import contracted_dims, operands_of


def ends(values: Values) -> frozenset[str]:
    """For each product the last value, if any, that all readers of it can do with."""
    found = [_end(values, name) for name in values.products]
    return frozenset(name for name in found if name is not None)


def _end(values: Values, start: str) -> str | None:
    """Walks on while all that is still read of the product's region is a single value."""
    shape = values.spec(start).shape
    region, applies, end = {start}, 0, None
    for node in values.graph.nodes[values.order[start] + 1 :]:
        if region.isdisjoint(node.refs()):
            continue
        if not _same_points(node, shape):
            break
        region.add(node.name)
        applies += is_pointwise(node)
        if applies > EPILOGUE_APPLIES:
            break
        live = [name for name in region if _is_read(values, name, region)]
        if live == [node.name] and is_pointwise(node):
            end = node.name
    return end


def _is_read(values: Values, name: str, region: set[str]) -> bool:
    return name in values.outputs or any(user.name not in region for user in values.users[name])


def _same_points(node: Node, shape: tuple[Dim, ...]) -> bool:
    """Whether a node has the product's rows and columns, in their order."""
    if node.spec is None or not node.spec.shape:
        return False
    small = node.spec.dtype in ITEM_BYTES and ITEM_BYTES[node.spec.dtype] <= ITEM_BYTES["float32"]
    kind = is_pointwise(node) or node.op == "aten.view.default"
    return kind and small and node.spec.shape[-1] == shape[-1] and node.spec.numel == product(shape)


@dataclass(frozen=True)
class Epilogues:
    """Which group each product takes up, and the groups that stay loops."""

    of: Mapping[str, Group]
    loops: tuple[Group, ...]


def epilogues(values: Values, groups: tuple[Group, ...]) -> Epilogues:
    """Give each product the first group that it can end in."""
    taken: dict[str, Group] = {}
    rest, places = list(groups), list(groups)
    for name in values.products:
        for group in rest:
            alone = replace(group, items=(name,))  # the product, for the question of cycles
            if not ends_product(values, group, name):
                continue
            if makes_cycle(values, [*places, alone], alone, group):
                continue
            taken[name] = group
            rest.remove(group)
            places[places.index(group)] = replace(group, items=(name, *group.items))
            break
    return Epilogues(taken, tuple(rest))


def ends_product(values: Values, group: Group, name: str) -> bool:
    """Whether a group is pointwise over the product's result and reads it at its own index."""
    kernel = kernel_of(group.assembled, "trial", "", group.items, values)
    reads = [i for i in kernel.body if isinstance(i, Load) and i.access.buffer == name]
    if len(reads) != 1 or not is_epilogue(kernel):
        return False
    shape = tuple(axis.size for axis in kernel.outer)
    whole = product(shape) == values.spec(name).numel
    own = Access(name, contiguous_strides(shape))
    return whole and shape[-1] == values.spec(name).shape[-1] and reads[0].access == own


def product_step(
    values: Values, node: Node, group: Group | None, stored: frozenset[str]
) -> Product:
    """The step of one product; `stored` are the values that others read."""
    if group is None:
        epilogue = _copied(values, node.name)
        outputs: tuple[str, ...] = (node.name,)
    else:
        outputs = tuple(item for item in group.items if item in stored)
        epilogue = kernel_of(group.assembled, "kernel", "", outputs, values)
        if node.name in stored:
            epilogue = _also_stored(epilogue, node.name)
            outputs = (*outputs, node.name)
    kernel = _kernel(values, node, epilogue)
    applied = (item.op for item in epilogue.body if isinstance(item, Apply) and item.op != "cast")
    operators = ("mm" if kernel.batches == ONE else "bmm", *applied)
    kernel = replace(kernel, summary=" → ".join(operators))
    return Product(
        name="",
        kernel=kernel,
        inputs=tuple(each.name for each in kernel.arguments if not each.is_output),
        outputs=outputs,
        operators=operators,
        bytes_moved=product_bytes(kernel, values.sizes),
        operations=product_operations(kernel, values.sizes),
    )


def _kernel(values: Values, node: Node, epilogue: LoopKernel) -> ProductKernel:
    a, *b = operands_of(node)
    a_dim, b_dim = contracted_dims(node)
    *batches, rows, columns = values.spec(node.name).shape
    return ProductKernel(
        name="",
        summary="",
        rows=rows,
        columns=columns,
        contracted=values.spec(a).shape[a_dim],
        batches=product(batches),
        a=_raw(values, a, a_dim),
        b=_split(values, b, b_dim) if len(b) > 1 else _raw(values, b[0], b_dim),
        epilogue=epilogue,
        product=_given(epilogue, node.name).name,
    )


def _raw(values: Values, name: str, contracted: int) -> RawOperand:
    spec = values.spec(name)
    *batch, row, column = spec.strides
    free, deep = (row, column) if contracted == -1 else (column, row)
    return RawOperand(name, spec.dtype, free, deep, batch[0] if batch else ZERO)


def _split(values: Values, parts: Sequence[str], contracted: int) -> SplitOperand:
    hi, lo, inverse = parts
    return SplitOperand(hi, lo, inverse, values.spec(hi).strides[-2], contracted == -2)


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
    load = _given(epilogue, name)
    arguments = [each for each in epilogue.arguments if each.name != name]
    return replace(
        epilogue,
        arguments=(*arguments, Argument(name, load.dtype, True)),
        body=(*epilogue.body, Store(load.name, load.dtype, load.access)),
    )
