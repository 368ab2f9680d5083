"""The equations that a kernel computes, as comments above it.

    relu[i, j] = max(0, sum_k(x[i, k] * gemm_weight[j, k]) + bias[j])

Indices are those of the kernel's axes, the one with the largest stride first. A value that is long,
or that several others need, has a line of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from fusewright.codegen.form import Form
from fusewright.ir.convolution import ConvAxis, Geometry
from fusewright.ir.graph import ONE, Dim, Ratio
from fusewright.ir.kernel import Kernel
from fusewright.ir.loop import (
    Access,
    Apply,
    Axis,
    Constant,
    Index,
    Instruction,
    Load,
    LoopKernel,
    Reduce,
    Scan,
    Store,
    reads,
)
from fusewright.plan.show import human_bytes, human_count

LETTERS = "ijklmnopqrst"
MOST_TEXT = 70  # of an expression in another
MOST_LINES = 5
MOST_SUMMARY = 60
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_INFIX |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_STRENGTH = {"*": 3, "/": 3, "+": 2, "-": 2}
_NAMES = {"maximum": "max", "minimum": "min", "reciprocal": "1 /", "neg": "-"}
_REDUCTIONS = {"welford": "mean"}
_SCANS = {"sum": "cumsum", "prod": "cumprod"}


def equations(form: Form, given: str = "", axes: Sequence[str] = ()) -> list[str]:
    """The equations of a loop, one a line. `given` is the text of the value that it is given, and
    `axes` are the letters of its axes. If there are many, those of values that are not stored go:
    the functions have them."""
    made = _Equations(form, given, axes or axis_letters(form.kernel))
    lines = list(made.lines())
    if len(lines) > MOST_LINES:
        lines = [line for line in lines if line.partition(" = ")[0] in made.stored]
    shown = lines[:MOST_LINES]
    return [*shown, f"... and {len(lines) - len(shown)} more"] if len(lines) > len(shown) else shown


def letters(count: int, first: int = 0) -> list[str]:
    return [LETTERS[at] if at < len(LETTERS) else f"i{at}" for at in range(first, first + count)]


class _Equations:
    """The values of one loop, by name: text and how strongly its parts hold together."""

    def __init__(self, form: Form, given: str, axes: Sequence[str]) -> None:
        self._form, self._given, self._kernel = form, given, form.kernel
        self._axes = axes
        self._texts: dict[str, tuple[str, int]] = {}
        body = form.kernel.body
        self._uses = Counter(name for item in body for name in reads(item))
        stores = [item for item in reversed(body) if isinstance(item, Store)]
        self._targets = {item.value: self._target(item) for item in stores}
        self.stored = {self._target(item) for item in stores}

    def lines(self) -> Iterator[str]:
        body = self._kernel.body
        for item in body:
            if isinstance(item, Store):
                yield from self._store(item)
                continue
            text, strength = self._text(item)
            self._texts[item.name] = text, strength
            if isinstance(item, Reduce) and item.second:
                inner = self._bare(item.operand)
                self._texts[item.second] = f"{self._sum('sum')}(({inner} - {text})^2)", 9
            plain = isinstance(item, Load | Constant | Index)
            shared = self._uses[item.name] > 1 and not plain
            if item.name in self._targets and not plain:
                yield f"{self._targets[item.name]} = {text}"
                self._texts[item.name] = self._targets[item.name], 9
            elif shared or (len(text) > MOST_TEXT and not plain):
                yield f"{self._form.names[item.name]} = {text}"
                self._texts[item.name] = self._form.names[item.name], 9

    def _store(self, item: Store) -> Iterator[str]:
        target, source = self._target(item), self._bare(item.value)
        if source not in (target, target.partition("[")[0]):
            yield f"{target} = {source}"

    def _target(self, item: Store) -> str:
        return _indexed(_name(self._form, item), item.access, self._axes)

    def _bare(self, name: str) -> str:
        return self._texts[name][0]

    def _sum(self, word: str) -> str:
        inner = self._axes[len(self._kernel.outer) :]
        return f"{word}_{''.join(inner)}" if inner else word

    def _text(self, item: Instruction) -> tuple[str, int]:
        match item:
            case Load() if item.name == self._form.given and self._given:
                return self._given, 9
            case Load():
                return _indexed(_name(self._form, item), item.access, self._axes), 9
            case Constant():
                return _number(item.value), 9
            case Index():
                terms = [_scaled(s, n) for s, n in zip(item.steps, self._axes, strict=True)]
                terms += [str(each) for each in item.start]
                return " + ".join(each for each in terms if each not in ("", "0")) or "0", 2
            case Apply():
                return self._applied(item)
            case Reduce():
                word = _REDUCTIONS.get(item.kind, item.kind)
                return f"{self._sum(word)}({self._bare(item.operand)})", 9
            case Scan():
                word = self._sum(_SCANS[item.kind])
                return f"{word}({self._bare(item.operand)})", 9
        raise AssertionError(item)

    def _applied(self, item: Apply) -> tuple[str, int]:
        parts = [self._texts[name] for name in item.operands]
        if sign := _INFIX.get(item.op):
            strength = _STRENGTH.get(sign, 1)
            left, right = _within(parts[0], strength), _within(parts[1], strength + 1)
            return f"{left} {sign} {right}", strength
        if item.op == "relu":
            return f"max(0, {parts[0][0]})", 9
        if item.op in ("neg", "reciprocal"):
            space = " " if item.op == "reciprocal" else ""
            return f"{_NAMES[item.op]}{space}{_within(parts[0], 4)}", 3
        if item.op == "cast":
            wide = item.dtype in ("float32", "float64")
            return parts[0] if wide else (f"{item.dtype}({parts[0][0]})", 9)
        return f"{_NAMES.get(item.op, item.op)}({', '.join(text for text, _ in parts)})", 9


def _name(form: Form, item: Load | Store) -> str:
    """The name of a buffer."""
    return form.pointers.get(item.access.buffer, item.access.buffer).removesuffix("_ptr")


def _within(part: tuple[str, int], least: int) -> str:
    text, strength = part
    return text if strength >= least else f"({text})"


def _number(value: int | float | bool | Dim | Ratio) -> str:
    if isinstance(value, Ratio):
        return _simple(value.text)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _simple(text: str) -> str:
    """An expression of sizes without factors of one, and without brackets around a name."""
    text = re.sub(r"(\d)\.0\b", r"\1", re.sub(r"\b1\.0 ?\* ?", "", text))
    before = ""
    while before != text:
        before = text
        text = re.sub(r"(?<!\w)\((\w+)\)", r"\1", text)
        text = re.sub(r"\(\(([^()]*)\)\)", r"(\1)", text)
    return text


def _scaled(step: Dim, index: str) -> str:
    if step.factor == 0:
        return ""
    return index if step == ONE else f"{step}*{index}"


def _indexed(name: str, access: Access, axes: Sequence[str]) -> str:
    """A tensor's element, by the axes along which it moves, the largest stride first."""
    moving = [pair for pair in zip(access.strides, axes, strict=True) if pair[0].factor]
    moving.sort(key=lambda each: _rank(each[0]))
    last = moving[-1][0] if moving else ONE
    names = [index for _, index in moving]
    if moving and last.is_static and last.factor not in (1, -1):
        names[-1] = f"{last.factor}*{names[-1]}"
    signs = [
        ("-" if each.factor < 0 else "+", str(each).removeprefix("-")) for each in access.offset
    ]
    shift = "".join(f" {sign} {size}" for sign, size in signs)
    return f"{name}[{', '.join(names)}{shift}]" if names or shift else name


def told(kernel: Kernel, lines: Sequence[str], extents: str) -> tuple[str, ...]:
    """The comment of a kernel: its operators, its equations, its sizes and what it costs."""
    last = "; ".join(each for each in (extents, cost_line(kernel)) if each)
    words = kernel.summary.split(" → ")
    while len(" → ".join(words)) > MOST_SUMMARY and len(words) > 3:
        words[-3:-1] = ["…"]
    return f"{kernel.name}: {' → '.join(words)}", *(f"  {line}" for line in lines), last


def cost_line(kernel: Kernel) -> str:
    """Bytes and operations: what each unit of a symbolic size takes, and what comes once."""
    if len(kernel.symbols) > 1:
        return ""
    at = [dict.fromkeys(kernel.symbols, size) for size in (1, 2, 3)]
    moved = [kernel.bytes_moved(sizes, {}) for sizes in at]
    done = [kernel.operations(sizes) for sizes in at]
    if moved[0] == moved[1] and done[0] == done[1]:
        return f"{human_bytes(moved[0])}, {human_count(done[0])} operations"
    if any(c - b != b - a for a, b, c in (moved, done)):
        return ""
    (symbol,), each = kernel.symbols, moved[1] - moved[0]
    text = f"{human_bytes(each)}, {human_count(done[1] - done[0])} operations for each {symbol}"
    rest = moved[0] - each
    return f"{text}; {human_bytes(rest)} once" if rest > 0 else text


def extents_line(form: Form) -> str:
    """The ranges of a loop's indices."""
    named = sorted(zip(axis_letters(form.kernel), form.kernel.axes, strict=True), key=_letter)
    return ", ".join(f"{letter} < {axis.size}" for letter, axis in named)


def _letter(named: tuple[str, Axis]) -> tuple[int, str]:
    return len(named[0]), named[0]


def axis_letters(kernel: LoopKernel) -> list[str]:
    """A letter for each axis, in the order of the strides of what is stored."""
    accesses = [
        item.access for kind in (Store, Load) for item in kernel.body if isinstance(item, kind)
    ]
    found = max(accesses, key=lambda each: sum(s.factor != 0 for s in each.strides), default=None)
    if found is None:
        return letters(len(kernel.axes))
    order = sorted(range(len(kernel.axes)), key=lambda at: _rank(found.strides[at]))
    named = dict(zip(order, letters(len(order)), strict=True))
    return [named[at] for at in range(len(order))]


def _rank(stride: Dim) -> tuple[int, int]:
    return -len(stride.symbols), -abs(stride.factor)


def convolution_equation(of: Geometry, result: str, source: str, weights: str) -> str:
    """A convolution as a sum over channels and taps. A transposed one adds to its outputs."""
    axes = [(axis, out, tap) for axis, out, tap in _spatial(of)]
    taps = ", ".join(tap for _, _, tap in axes)
    near = ", ".join(out for _, out, _ in axes)
    far = ", ".join(_position(*each) for each in axes)
    kernel = f"{weights}[m, c, {taps}]"
    if of.transposed:
        return f"{result}[n, m, {far}] += sum_c({source}[n, c, {near}] * {kernel})"
    summed = "".join(tap for _, _, tap in axes)
    return f"{result}[n, m, {near}] = sum_c{summed}({source}[n, c, {far}] * {kernel})"


def gradient_equation(of: Geometry, result: str, source: str, grad_output: str) -> str:
    """The gradient by the weights: a sum over images and positions."""
    axes = [(axis, out, tap) for axis, out, tap in _spatial(of)]
    taps = ", ".join(tap for _, _, tap in axes)
    near = ", ".join(out for _, out, _ in axes)
    far = ", ".join(_position(*each) for each in axes)
    if of.transposed:
        near, far = far, near
    summed = "".join(out for _, out, _ in axes)
    terms = f"{grad_output}[n, m, {near}] * {source}[n, c, {far}]"
    return f"{result}[m, c, {taps}] = sum_n{summed}({terms})"


def convolution_sizes(of: Geometry) -> str:
    """The ranges of a convolution's indices."""
    found = {"n": of.images, "c": of.channels, "m": of.results}
    for axis, out, tap in _spatial(of):
        found |= {out: axis.size if of.transposed else axis.result, tap: axis.taps}
    groups = f"; {of.groups} groups" if of.groups > 1 else ""
    return ", ".join(f"{name} < {size}" for name, size in found.items()) + groups


def _spatial(of: Geometry) -> list[tuple[ConvAxis, str, str]]:
    """The axes along which a convolution moves, with the letters of positions and taps."""
    every = list(zip(of.axes, "zyx", "klh", strict=True))
    named = [each for each in every if not each[0].is_single]
    return named or every[-1:]


def _position(axis: ConvAxis, out: str, tap: str) -> str:
    first = out if axis.stride == 1 else f"{axis.stride}*{out}"
    second = tap if axis.dilation == 1 else f"{axis.dilation}*{tap}"
    text = first if axis.taps == 1 else f"{first} + {second}"
    return f"{text} - {axis.before}" if axis.before else text


_OF_AXES = {"image": "n", "channel": "m", "member": "g", "plane": "p", "z": "z", "y": "y", "x": "x"}


def convolution_letters(form: Form) -> list[str]:
    """The letters of an epilogue's axes: positions, then channels, unless the axes have names."""
    kernel = form.kernel
    if all(axis.name in _OF_AXES for axis in kernel.axes):
        return [_OF_AXES[axis.name] for axis in kernel.axes]
    positions = {1: "p", 2: "np", 3: "nyx", 4: "nzyx"}.get(len(kernel.outer), "")
    if not positions or len(kernel.inner) != 1:
        return axis_letters(kernel)
    return [*positions, "m"]
