"""Small pieces of C++: identifiers, literals, sizes and comments."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping

from fusewright.errors import CodegenError
from fusewright.ir.graph import Dim, Ratio
from fusewright.ir.rounding import rounded

MOST_LETTERS = 24  # of a name in C++
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

_KEYWORDS = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl const
    constexpr const_cast continue decltype default delete do double dynamic_cast else enum explicit
    export extern false float for friend goto if inline int long mutable namespace new noexcept not
    not_eq nullptr operator or or_eq private protected public register reinterpret_cast return
    short signed sizeof static static_assert static_cast struct switch template this thread_local
    throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while
    xor xor_eq char16_t char32_t restrict main
    """.split()
)
# Macros in scope, and the names that our own templates use.
_RESERVED = _KEYWORDS | frozenset(
    """
    signbit isnan isinf errno linux unix NULL NAN INFINITY I V W K p q l n v acc row elem body one
    other fw std workspace where stream narrow vectors Elem Row load visit begin finish store
    accumulators lane combine folded keep memory far give terms m tile fetched Tile Fetched fetch
    stage flush scanned Scanned Carry factors Factors compute
    """.split()
)


def identifier(name: str) -> str:
    """The name itself, if it is a C++ identifier. Otherwise this is a bug in Fusewright."""
    if not _IDENTIFIER.match(name) or name in _KEYWORDS or "__" in name:
        raise CodegenError(f"{name!r} is not a valid name of a C function")
    return name


def unique_names(names: Iterable[str], taken: Iterable[str] = ()) -> dict[str, str]:
    """A C++ identifier for each name: similar to it, and all different."""
    used = set(taken)
    chosen: dict[str, str] = {}
    for name in names:
        if name in chosen:
            continue
        base = re.sub(r"_+", "_", re.sub(r"[^A-Za-z0-9]", "_", name)).strip("_") or "value"
        base = _short(base)
        # i0 and j1 are coordinates. A leading digit or a reserved word makes no identifier.
        if base[0].isdigit() or base in _RESERVED or re.match(r"([ijk]\d+|FW_.*|k[A-Z].*)\Z", base):
            base = f"v_{base}"
        candidate, serial = base, 2
        while candidate in used:
            candidate, serial = f"{base}_{serial}", serial + 1
        used.add(candidate)
        chosen[name] = candidate
    return chosen


def _short(name: str) -> str:
    """The last words of a long name, such as that of a layer of a layer of a layer."""
    ending = "_ptr" if name.endswith("_ptr") else ""
    stem = name.removesuffix(ending)
    while len(stem) > MOST_LETTERS:
        rest = stem.partition("_")[2]
        stem = rest or stem[-MOST_LETTERS:]
    return stem + ending


def comment(text: str) -> str:
    """The text as one line that stays within a // comment."""
    flat = " ".join(text.split())
    printable = "".join(ch if ch.isprintable() else "?" for ch in flat)
    # A backslash at the end would continue the comment. In old standards, ??/ is a backslash.
    return printable.replace("\\", "/").replace("??", "? ?").replace("*/", "* /")


def size_text(size: Dim, symbols: Mapping[str, str]) -> str:
    """A size or stride as a C++ expression."""
    parts = [symbols[name] for name in size.symbols]
    if size.factor != 1 or not parts:
        parts.insert(0, str(size.factor))
    return " * ".join(parts)


def sum_text(terms: Iterable[str]) -> str:
    kept = [term for term in terms if term != "0"]
    return " + ".join(kept) if kept else "0"


def scaled_text(stride: Dim, coordinate: str, symbols: Mapping[str, str]) -> str:
    """stride * coordinate, without factors of 1 or 0."""
    if stride.factor == 0:
        return "0"
    if stride == Dim(1):
        return coordinate
    return f"{coordinate} * {size_text(stride, symbols)}"


def size_in_doubles(value: Dim | Ratio, symbols: Mapping[str, str]) -> str:
    """An expression of sizes that the host computes in double."""
    if isinstance(value, Dim):
        factors = [_as_double(name, symbols) for name in value.symbols]
        return " * ".join([f"{value.factor}.0", *factors])
    tokens = _TOKEN.findall(value.text)
    if "".join(tokens) != "".join(value.text.split()):
        raise CodegenError(f"{value.text!r} is not an expression of sizes")
    words = [_as_double(token, symbols) if _is_name(token) else _pointed(token) for token in tokens]
    spaced = zip(words, ["(", *words], strict=False)
    text = "".join(f" {word} " if _is_binary(word, last) else word for word, last in spaced)
    return _plain(text)


def _pointed(token: str) -> str:
    """A number as a double."""
    return f"{token}.0" if token.isdigit() else token


def _plain(text: str) -> str:
    """The same number without first factors of one and needless brackets."""
    before = ""
    while text != before:
        before = text
        text = re.sub(r"(^|\(|[+-] )1\.0 \* ", r"\1", text)
        text = re.sub(r"(?<!\w)\((double\(\w+\)|[\w.]+)\)", r"\1", text)
        text = re.sub(rf"\((\({_INSIDE}\))\)", r"\1", text)
        text = re.sub(rf"^\(({_INSIDE})\)$", r"\1", text)
    return text


_INSIDE = r"[^()]*(?:double\(\w+\)[^()]*)*"  # of a bracket
_TOKEN = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[A-Za-z_]\w*|[-+*/()]")


def _is_binary(word: str, last: str) -> bool:
    """Whether a sign stands between two operands."""
    return word in ("+", "-", "*", "/") and last not in ("(", "+", "-", "*", "/")


def _is_name(token: str) -> bool:
    return token[0].isalpha() or token[0] == "_"


def _as_double(name: str, symbols: Mapping[str, str]) -> str:
    if name not in symbols:
        raise CodegenError(f"symbol {name!r} is not a symbol of the kernel")
    return f"double({symbols[name]})"


def literal(value: int | float | bool, dtype: str) -> str:
    """A constant of the dtype's register type, rounded to the dtype."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype.startswith(("int", "uint")):
        return _whole_literal(int(value), dtype)
    number = rounded(float(value), dtype)
    kind = "double" if dtype == "float64" else "float"
    if math.isnan(number):
        return f"std::numeric_limits<{kind}>::quiet_NaN()"
    if math.isinf(number):
        sign = "-" if number < 0 else ""
        return f"{sign}std::numeric_limits<{kind}>::infinity()"
    return repr(number) if dtype == "float64" else f"{_shortest(number)}f"


def _shortest(number: float) -> str:
    """The shortest text that a compiler reads as this float32."""
    for digits in range(1, 9):
        text = f"{number:.{digits}g}"
        # Near the middle of two floats, reading as float64 first could round twice.
        if rounded(float(text), "float32") == number and _is_near(float(text), number):
            return text if "." in text or "e" in text else f"{text}.0"
    return repr(number)


def _is_near(text: float, number: float) -> bool:
    """Whether a number is much closer to this float32 than to another."""
    raw = int(struct.unpack("<I", struct.pack("<f", abs(number)))[0])
    after = float(struct.unpack("<f", struct.pack("<I", raw + 1))[0])
    return abs(text - number) < 0.49 * (after - abs(number))


def _whole_literal(value: int, dtype: str) -> str:
    bits = int(dtype.lstrip("uint"))
    wrapped = value % (1 << bits)
    if not dtype.startswith("u") and wrapped >= 1 << (bits - 1):
        wrapped -= 1 << bits
    if wrapped == -(1 << 63):
        return "(-9223372036854775807LL - 1)"
    return f"{wrapped}LL" if bits == 64 else str(wrapped)
