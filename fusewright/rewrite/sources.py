"""Tensors that a graph makes from numbers: constants, and counting along an index.

    full(c)[i] = c
    iota(start, step)[i] = start + step · i           with integers
    arange(a, …, s)[i] = a + s · i                     in double, then rounded
    linspace(a, b, n)[i] = a + s · i or b - s · (n - 1 - i), from the nearer end, s = (b-a)/(n-1)

Loops compute them where they are read, so they need no memory. A list of different numbers stays a
literal: a tensor that is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fusewright.ir.graph import FLOATS, INTEGERS, Arg, Node, Ref, Symbolic, TensorSpec
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.numbers import Number, same_number

_LARGEST = 2**53  # whole numbers up to here are exact in double


def _constant(builder: Builder, node: Node, value: Arg) -> Ref:
    return builder.add(Node(node.name, "full", (value,), (), node.spec, node.source))


def _full(builder: Builder, node: Node) -> Ref:
    return _constant(builder, node, node.args[1])


def _scalar_tensor(builder: Builder, node: Node) -> Ref:
    return _constant(builder, node, node.args[0])


def _literal(builder: Builder, node: Node) -> Ref | None:
    """A literal of equal numbers is that number, and one of equal steps is counted."""
    assert node.spec is not None
    numbers = list(_numbers(node.args[0]))
    if not numbers:
        return None
    if all(same_number(each, numbers[0]) for each in numbers):
        return _constant(builder, node, numbers[0])
    whole = [int(each) for each in numbers if float(each).is_integer()]
    if len(whole) < len(numbers) or node.spec.dtype not in (*INTEGERS, "float32", "float64"):
        return None
    start, step = whole[0], whole[1] - whole[0]
    even = all(each == start + step * at for at, each in enumerate(whole))
    negative_zero = any(repr(each) == "-0.0" for each in numbers)
    flat = len(node.spec.shape) == 1 and max(map(abs, whole)) < _LARGEST
    return _iota(builder, node, start, step) if even and flat and not negative_zero else None


def _numbers(value: Arg) -> Iterator[Number]:
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def _arange(builder: Builder, node: Node) -> Ref | None:
    values = [arg for arg in node.args if not isinstance(arg, Symbolic)]
    start: Arg = 0 if len(values) == 1 else values[0]
    step = values[2] if len(values) > 2 else node.argument("step", None, 1)
    return _counted(builder, node, start, step)


def _prims_iota(builder: Builder, node: Node) -> Ref | None:
    return _iota(builder, node, node.argument("start", None, 0), node.argument("step", None, 1))


def _iota(builder: Builder, node: Node, start: Arg, step: Arg) -> Ref | None:
    """start, start + step, …; PyTorch's if either is not an integer that is known now."""
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    return builder.add(Node(node.name, "iota", (start, step), (), node.spec, node.source))


def _counted(builder: Builder, node: Node, start: Arg, step: Arg) -> Ref | None:
    """start, start + step, … of any numbers that are known now."""
    assert node.spec is not None
    if not isinstance(start, int | float) or not isinstance(step, int | float):
        return None
    if float(start).is_integer() and float(step).is_integer():
        return _iota(builder, node, int(start), int(step))
    if node.spec.dtype not in FLOATS:
        return None
    return _rounded(builder, node, _line(builder, node, start, step))


def _linspace(builder: Builder, node: Node) -> Ref | None:
    """PyTorch counts from the nearer end, so that both ends are exact."""
    assert node.spec is not None
    start, end, steps = node.args[:3]
    numbers = all(isinstance(each, int | float) for each in (start, end))
    if not numbers or not isinstance(steps, int) or node.spec.dtype not in FLOATS:
        return None
    assert isinstance(start, int | float) and isinstance(end, int | float)
    if steps < 2:
        return _constant(builder, node, start)
    step = (end - start) / (steps - 1)
    if all(float(each).is_integer() for each in (start, step)):
        return _iota(builder, node, int(start), int(step))
    first = _line(builder, node, start, step)
    last = _line(builder, node, end - step * (steps - 1), step, end)
    index = _index(builder, node, "int64")
    asked = replace(node, name=f"{node.name}_first", spec=None)
    near = builder.point(asked, "lt", (index, steps // 2), "bool")
    wide = replace(node, spec=replace(node.spec, dtype="float64"))
    return _rounded(builder, node, builder.point(wide, "where", (near, first, last), "float64"))


def _line(
    builder: Builder, node: Node, start: Number, step: Number, end: Number | None = None
) -> Ref:
    """start + step · i in double; with an `end`, end - step · (how many follow)."""
    assert node.spec is not None
    wide = replace(node, spec=replace(node.spec, dtype="float64"))
    if end is None:
        scaled = builder.point(
            wide, "mul", (_index(builder, node, "float64"), float(step)), "float64"
        )
        return builder.point(wide, "add", (scaled, float(start)), "float64")
    back = _index(builder, node, "float64", from_end=True)
    scaled = builder.point(wide, "mul", (back, float(step)), "float64")
    return builder.point(wide, "sub", (float(end), scaled), "float64")


def _index(builder: Builder, node: Node, dtype: str, from_end: bool = False) -> Ref:
    assert node.spec is not None
    spec = TensorSpec(dtype, node.spec.shape, node.spec.strides, node.spec.device)
    numbers = (node.spec.shape[0].factor - 1, -1) if from_end else (0, 1)
    name = f"{node.name}_{'back' if from_end else 'index'}"
    return builder.add(Node(name, "iota", numbers, (), spec, node.source))


def _rounded(builder: Builder, node: Node, value: Ref) -> Ref:
    assert node.spec is not None
    return builder.point(node, "cast", (value,), node.spec.dtype)


SOURCES: dict[str, Callable[[Builder, Node], Ref | None]] = {
    "aten.full.default": _full,
    "aten.full_like.default": _full,
    "aten.scalar_tensor.default": _scalar_tensor,
    "literal": _literal,
    "aten.arange.start_step": _arange,
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.linspace.default": _linspace,
    "prims.iota.default": _prims_iota,
}
