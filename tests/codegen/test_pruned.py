"""The support code: what a text needs of our headers, and nothing else."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from fusewright.codegen.declarations import declarations, expanded, macro_of, tokens_of
from fusewright.codegen.preprocess import resolved, without_comments
from fusewright.codegen.pruned import support_lines
from fusewright.codegen.reachable import parsed
from fusewright.codegen.render import KERNELS, flattened

CUDA, HOST = frozenset({("__CUDACC__", True)}), frozenset({("__CUDACC__", False)})
HEADER = """\
#include <cstdint>

#if defined(__CUDACC__)
#define FW_FN __device__
#else
#define FW_FN inline
#endif

namespace fw {

// Two of a kind.
struct half { int raw; };  // in memory
struct bf16 { int raw; };
FW_FN float value(half x) { return x.raw; }
FW_FN float value(bf16 x) { return x.raw; }
template <class T>
struct Store {
  using Kind = T;
  static constexpr int kBytes = sizeof(T), kOther = 1;
  T held;
  FW_FN T read() const { return held; }
  FW_FN T write(T x) const { return row(x, "// no comment"); }
};
template <>
struct Store<bf16> {};

#define FW_TWO(NAME) \\
  FW_FN int NAME(int x) { return NAME##_more(x, kLimit); }
FW_FN int twice_more(int x, int by) { return x + x + by; }
constexpr int kLimit = 3, kLeast = 1;
FW_TWO(twice)
#undef FW_TWO

#if defined(__FMA__)
FW_FN int row(int x, const char*) { return x; }
#else
FW_FN int row(int x, const char*) { return x + 1; }
#endif

}  // namespace fw

extern "C" const char* fw_error_text(int code) { return code == 0 ? "none" : "some"; }
"""


def pruned(text: str, defined: frozenset[tuple[str, bool]] = HOST) -> str:
    headers = parsed(HEADER, defined)
    return "\n".join([*headers.includes, *support_lines(headers, text)])


def test_only_what_is_mentioned_is_kept() -> None:
    text = pruned("int f() { return fw::kLeast; }")
    assert "constexpr int kLimit = 3, kLeast = 1;" in text
    assert "struct" not in text and "twice" not in text and "fw_error_text" not in text
    assert "kLimit" not in pruned("int kLimit, twice, row;"), "names of others' scopes"


def test_a_macro_declares_what_it_stands_for() -> None:
    text = pruned("int f() { return fw::twice(1); }")
    assert "FW_TWO(twice)" in text and "#undef FW_TWO" in text
    assert "twice_more" in text and "kLimit" in text


def test_overloads_and_members_go_with_their_types_and_names() -> None:
    text = pruned("float f(fw::half x) { return fw::value(x); }")
    assert "value(half x)" in text and "bf16" not in text
    text = pruned("int f(fw::Store<int> x) { return x.read(); }")
    assert "T read()" in text and "write" not in text and "kBytes" not in text
    assert "T held;" in text and "Store<bf16>" not in text and "row" not in text
    both = pruned("int f(fw::Store<fw::bf16> x) { return x.write(0) + x.kOther; }")
    assert "Store<bf16> {};" in both and 'row(x, "// no comment")' in both
    assert "kBytes = sizeof(T), kOther = 1;" in both


def test_conditions_stay_with_what_they_contain() -> None:
    text = pruned("int f() { return fw::row(1, nullptr); }")
    assert text.count("#if defined(__FMA__)") == text.count("#else") == text.count("#endif") == 1
    assert text.count("#define FW_FN inline") == 1 and "__CUDACC__" not in text
    assert "__FMA__" not in pruned("int f() { return fw::kLeast; }")
    assert "#define FW_FN __device__" in pruned("fw::half x;fw::value(x)", CUDA)


def test_the_namespace_is_closed_before_other_declarations() -> None:
    text = pruned("fw::row(1, nullptr), fw_error_text")
    assert text.index("#endif") < text.index("}  // namespace fw") < text.index('extern "C"')
    assert text.count("namespace fw {") == text.count("}  // namespace fw") == 1


def test_known_conditions_are_resolved() -> None:
    lines = """\
#if defined(A) && defined(B)
one
#elif !defined(A)
two
#elif C > 1
three
#else
four
#endif
#ifndef A
five
#endif""".splitlines()
    assert resolved(lines, {"A": False}) == ["two", "five"]
    assert resolved(lines, {"A": True, "B": True}) == ["one"]
    assert resolved(lines, {"A": True, "B": False}) == [
        "#if C > 1",
        "three",
        "#else",
        "four",
        "#endif",
    ]
    assert resolved(lines, {}) == lines
    nested = ["#if defined(A)", "#if X", "one", "#endif", "#endif", "two"]
    assert resolved(nested, {"A": False}) == ["two"]
    assert resolved(nested, {"A": True}) == ["#if X", "one", "#endif", "two"]


def test_comments_go_but_not_those_in_strings() -> None:
    lines = ["// all of it", 'x = "// no";  // but this', "", "// clang-format off", "y = '\"';"]
    expected = ['x = "// no";', "", "// clang-format off", "y = '\"';"]
    assert without_comments(lines) == expected


def test_macros_are_expanded_with_their_arguments() -> None:
    found = macro_of("#define FW_BOTH(A, B) \\\n  int A##_##B(int) { return B; }")
    assert found is not None and found[0] == "FW_BOTH"
    text = expanded(found[1], tokens_of("FW_BOTH(one, two)"))
    assert [each.names for each in declarations(text, tokens_of(text))] == [("one_two",)]


def roots(language: str) -> list[str]:
    folders = ("scalar", "host") if language == "host" else ("cuda", "convolution", "sm90")
    files = (path for folder in folders for path in (KERNELS / folder).rglob("*.?*p*"))
    files = itertools.chain(files, *((KERNELS / folder).rglob("*.cuh") for folder in folders))
    return sorted({str(path.relative_to(KERNELS)) for path in files})


@pytest.mark.parametrize("language", ["host", "cuda"])
def test_everything_in_our_headers_is_understood(language: str) -> None:
    """Each declaration has a name, and with all names nothing is lost."""
    pasted: set[str] = set()
    text = "\n".join(line for root in roots(language) for line in flattened(root, pasted))
    defined = CUDA if language == "cuda" else HOST
    headers = parsed(text, defined)
    for part in headers.parts:
        assert part.names or part.of.kind in ("directive", "other"), part.of.text[:200]
    every = {*re.findall(r"\w+", text), *(name for part in headers.parts for name in part.names)}
    kept = support_lines(headers, " ".join(f"fw::{name} {name}" for name in every))
    whole = resolved(without_comments(opened(text.splitlines())), dict(defined))
    rest = [line for line in whole if not line.startswith("#include")]
    assert tokens(opened(kept)) == tokens(rest)


def opened(lines: Iterable[str]) -> list[str]:
    """The lines without the brackets of our namespace."""
    return [line for line in lines if line not in ("namespace fw {", "}  // namespace fw")]


def tokens(lines: Iterable[str]) -> list[str]:
    return [each.text for each in tokens_of("\n".join(lines))]


@pytest.mark.parametrize("driver", sorted(roots("host")))
def test_each_host_header_compiles_when_pruned(driver: str, tmp_path: Path) -> None:
    """With all functions that it declares: what they need is kept."""
    pasted: set[str] = set()
    text = "\n".join([*flattened("host/loops.hpp", pasted), *flattened(driver, pasted)])
    own = (KERNELS / driver).read_text()
    uses = " ".join(f"fw::{name}" for name in re.findall(r"\b(\w+)\(", own))
    headers = parsed(text, HOST)
    lines = [*headers.includes, *support_lines(headers, f"{uses} fw_error_text")]
    source = tmp_path / "pruned.cpp"
    source.write_text("\n".join(lines) + "\n")
    command = ["g++", "-std=c++17", "-fopenmp", "-march=native", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
