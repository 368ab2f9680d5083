"""Python text from values of the graph language: names, literals, calls and definitions.

All text from the user's model goes through `identifier` or `quoted`, so that it cannot become
code. Each statement is one line, however long: `wrap` breaks it.
"""

from __future__ import annotations

import builtins
import hashlib
import keyword
import math
import re
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusewright.emit.wrap import COLUMNS
from fusewright.errors import GraphError
from fusewright.ir.graph import Arg, Dim, Node, Ratio, Ref, Symbol, Symbolic, TensorSpec

# Local names in our own lines.
_OURS = frozenset("torch device need values sizes module leaves want in_place saves o _".split())
_TAKEN = _OURS | frozenset(keyword.kwlist) | frozenset(dir(builtins))
_RESERVED = re.compile(r"_fw|fw_|custom_|need_\d", re.IGNORECASE)
# Longer names are cut, so that lines stay readable.
LONGEST_NAME = 40


def plain(text: str) -> str:
    """Text for a comment or docstring: one line that cannot end it."""
    return " ".join(text.split()).replace("\\", "/").replace('"', "'")


def quoted(text: str) -> str:
    """A string literal of exactly this text, in double quotes unless it has some itself."""
    literal = ascii(text)
    if literal[0] == "'" and '"' not in text:
        return '"' + literal[1:-1].replace("\\'", "'") + '"'
    return literal


def identifier(name: str, taken: Container[str] = ()) -> str:
    """A local variable's name that resembles `name` and is not in `taken`."""
    word = re.sub(r"\W", "_", name, flags=re.ASCII)
    word = re.sub("pass", "pas_s", word, flags=re.IGNORECASE)
    if len(word) > LONGEST_NAME:
        word = word[: LONGEST_NAME // 2] + word[-LONGEST_NAME // 2 :]
    if not word or not (word[0].isalpha() or word[0] == "_"):
        word = f"v_{word}"
    reserved = word in taken or word in _TAKEN or _RESERVED.match(word)
    chosen, count = (f"{word}_v" if reserved else word), 1
    while chosen in taken or chosen in _TAKEN:
        count += 1
        chosen = f"{word}_v{count}"
    return chosen


def identifiers(names: Iterable[str], taken: Iterable[str] = ()) -> dict[str, str]:
    """A variable for each name, all different."""
    chosen: dict[str, str] = {}
    used = set(taken)
    for name in names:
        if name not in chosen:
            chosen[name] = identifier(name, used)
            used.add(chosen[name])
    return chosen


@dataclass(frozen=True)
class Scope:
    """The names of one function: a variable for each value, and the type of its device."""

    names: Mapping[str, str]
    device_type: str

    def __getitem__(self, name: str) -> str:
        return self.names[name]


def literal(arg: Arg, scope: Scope) -> str:
    """An operator's argument as an expression."""
    match arg:
        case Ref(name):
            return scope[name]
        case Symbolic("device", name):
            return device_text(name.removeprefix("torch."), scope)
        case Symbolic(_, name):
            return dtype(name)
        case Ratio(text):
            return _ratio(text)
        case tuple():
            return "[" + ", ".join(literal(item, scope) for item in arg) + "]"
        case str():
            return quoted(arg)
        case float():
            return number(arg)
        case _:
            return str(arg)


def _ratio(text: str) -> str:
    """A quotient of sizes. For an empty batch it is NaN, like PyTorch's mean."""
    symbols = sorted(set(re.findall(r"[A-Za-z_]\w*", text)))
    if "/" not in text or not symbols:
        return text
    return f'({text} if {" and ".join(symbols)} else float("nan"))'


def number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def constant(value: object) -> str:
    """A plain attribute's value as an expression."""
    match value:
        case str():
            return quoted(value)
        case float():
            return number(value)
        case tuple():
            return row(constant(item) for item in value)
    return repr(value)


def tensor_literal(node: Node) -> tuple[str, str]:
    """A `literal` node's name in the module, and the arguments for `_fw_here`."""
    assert node.spec is not None
    spec, values = node.spec, _nested(node.args[0])
    made = f"torch.tensor({values}, dtype={dtype(spec.dtype)}).reshape({dims(spec.shape)})"
    return f"_FW_LITERAL_{hashlib.sha256(made.encode()).hexdigest()[:8]}", f"({made}, {{}})"


def _nested(value: Arg) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_nested(item) for item in value) + "]"
    return constant(value)


def device_text(device: str, scope: Scope) -> str:
    """The current device, or a device of another type by its name."""
    return (
        "device" if device.split(":")[0] == scope.device_type else f"torch.device({quoted(device)})"
    )


def dtype(name: str) -> str:
    """A dtype, or another constant of PyTorch."""
    return f"torch.{_checked(name.removeprefix('torch.'))}"


def _checked(name: str) -> str:
    if not name.isidentifier():
        raise GraphError(f"{name!r} is not the name of a PyTorch constant")
    return name


def dims(values: Sequence[Dim]) -> str:
    """Sizes or strides as a tuple."""
    return row(str(value) for value in values)


def row(texts: Iterable[str]) -> str:
    """A tuple of expressions."""
    items = tuple(texts)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def size(symbol: Symbol, tensor: str) -> str:
    """Reads a symbol from the tensor that has it."""
    whole = f"{tensor}.shape[{symbol.dim}]"
    return whole if symbol.multiple == 1 else f"{whole} // {symbol.multiple}"


def device_kind(spec: TensorSpec) -> str:
    return spec.device.split(":")[0]


def layout(spec: TensorSpec, device_type: str) -> list[str]:
    """dtype, shape, strides, and the kind of device unless it is the kernels'."""
    fields = [dtype(spec.dtype), dims(spec.shape), dims(spec.strides)]
    kind = device_kind(spec)
    return fields if kind == device_type else [*fields, quoted(kind)]


# Operators for which torch has a function with the same arguments in the same order. torch.ops
# matches each call with the operator's schema, which takes longer than the rest of a small call
# (Xeon 2.1 GHz, PyTorch 2.13, CPU tensors of one element: convolution 35 → 17 µs, mm 7 → 3).
_FUNCTIONS = frozenset(
    "mm addmm bmm baddbmm mv dot convolution cat embedding permute reshape as_strided".split()
)


def operator(node: Node, scope: Scope) -> tuple[str, list[str]]:
    """The callee and the arguments of a node that PyTorch runs."""
    parts = node.op.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise GraphError(f"{node.name}: {node.op!r} is not an operator of PyTorch")
    given = [literal(arg, scope) for arg in node.args]
    given += [f"{_checked(key)}={literal(value, scope)}" for key, value in node.kwargs]
    if (
        parts[0] == "aten"
        and parts[2:] == ["default"]
        and parts[1] in _FUNCTIONS
        and not node.kwargs
    ):
        return f"torch.{parts[1]}", given
    return "torch.ops." + ".".join(parts), given


def sliced(node: Node, scope: Scope) -> str | None:
    """A slice with fixed ends as an index of Python, which means the same and takes a third of the
    time; None if it has others."""
    source, dim, step = node.args[0], node.argument("dim", 1, 0), node.argument("step", 4, 1)
    start, end = node.argument("start", 2), node.argument("end", 3)
    fixed = all(each is None or type(each) is int for each in (start, end, step))
    if not isinstance(source, Ref) or not fixed or not isinstance(dim, int) or dim < 0:
        return None
    texts = ["" if each is None else str(each) for each in (start, end)]
    along = ":".join([*texts, *([] if step in (None, 1) else [str(step)])])
    return f"{scope[source.name]}[{':, ' * dim}{along}]"


def call(target: str, callee: str, args: Iterable[str]) -> list[str]:
    """`target = callee(args)`."""
    text = f"{callee}({', '.join(args)})"
    return [f"{target} = {text}" if target else text]


def returned(items: Sequence[str]) -> list[str]:
    """The statement that returns a tuple."""
    return [f"return {row(items)}"]


def indented(lines: Iterable[str], levels: int = 1) -> list[str]:
    return [("    " * levels + line) if line else line for line in lines]


def function(name: str, parameters: Sequence[str], doc: str, body: Sequence[str]) -> list[str]:
    """A function definition after two blank lines. `doc` may be empty."""
    head = ["", "", f"def {name}({', '.join(parameters)}):"]
    text = f'"""{plain(doc)}'
    if len(text) + 7 > COLUMNS:
        body = [*textwrap.wrap(text, COLUMNS - 10), '"""', *body]
    elif doc:
        body = [f'{text}"""', *body]
    return [*head, *indented(body)]


def mentions(lines: Iterable[str], name: str) -> bool:
    """Whether a line uses this variable."""
    word = re.compile(rf"(?<![\w.'\"]){re.escape(name)}(?!\w)")
    return any(word.search(line) for line in lines)


def symbols_in(dims_used: Iterable[Dim]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(symbol for each in dims_used for symbol in each.symbols))
