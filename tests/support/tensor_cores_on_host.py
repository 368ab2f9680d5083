"""Tensor-core kernels as text for g++ and fibers; sm90_on_host.hpp emulates the instructions."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from fusewright.codegen.render import flattened
from fusewright.codegen.source import Source
from tests.support import loop_runs
from tests.support.cuda_on_host import LAUNCH as PLAIN_LAUNCH
from tests.support.cuda_on_host import SHARED, SHIM

STAND_IN = Path(__file__).parent / "sm90_on_host.hpp"
LAUNCH = re.compile(r"kernel<<<(\w+), (\w+), ([^;,]*), [^;]*?>>>\(([^;]*?)\);", re.DOTALL)
# An epilogue by columns, as generated ones are, from `load`, `give` and `visit` of an element.
BY_COLUMNS = r"""
template <class Plain>
struct Columns {
  static constexpr bool kOuterRest = false, kByPosition = false;
  static constexpr int kPartBytes = 8;
  template <int V> using Elem = typename Plain::template Elem<V>;
  struct Factors { int64_t row; };
  template <int V> struct Row { int64_t column; };
  template <int V> struct Acc { static constexpr bool kEmpty = true; };
  Plain plain;
  int64_t outer_extent() const { return plain.columns; }
  int64_t outer_lane_extent() const { return plain.columns; }
  template <int V> Acc<V> accumulators(fw::Phase<0>) const { return {}; }
  template <int V> void begin(Row<V>& row, int64_t, int64_t l, int) const { row.column = l; }
  template <int V> void compute(Factors& factors, int64_t q, int64_t) const { factors.row = q; }
  template <int V> void load(fw::Phase<0>, Elem<V>& elem, const Row<V>& row, int64_t q,
                             int64_t) const {
    plain.load(elem, q, row.column);
  }
  template <int V> void give(Elem<V>& elem, int v, float x) const { plain.give(elem, v, x); }
  template <int V> void visit(fw::Phase<0>, const Elem<V>& elem, const Factors& factors,
                              const Row<V>& row, Acc<V>&, int64_t q, int64_t, int n) const {
    if (factors.row != q) std::abort();  // another row's
    plain.visit(elem, q, row.column, n);
  }
};
template <class Plain>
using Ends = fw::ByColumn<Columns<Plain>>;
"""


def with_stand_in(name: str, pasted: set[str]) -> list[str]:
    """`flattened`, with the stand-in where the instructions would be."""
    if name == "sm90/isa/sm90_instructions.cuh" or "sm90/isa/sm90_instructions.cuh" in pasted:
        return flattened(name, pasted)
    pasted.add("sm90/isa/sm90_instructions.cuh")
    return [*flattened(str(STAND_IN), pasted), *flattened(name, pasted)]


def on_host(text: str) -> str:
    """The text of tensor-core kernels for g++."""
    found = SHARED.search(text) and (LAUNCH.search(text) or "launch_behind(kernel" in text)
    assert found, "no kernel for tensor cores"
    return text_on_host(text)


def text_on_host(text: str) -> str:
    """The same text for g++: launches become calls, and cuda_on_host.hpp replaces the toolkit."""
    text = LAUNCH.sub(
        r"gridDim = dim3(\1); emulation::launch(dim3(\1), \2, \3, [&] { kernel(\4); });", text
    )
    text = SHARED.sub("char* const memory = emulated_shared;", text)
    text = PLAIN_LAUNCH.sub(r"emulation::launch(\2, \3, \4, [&] { \1(\5); });", text)
    assert "<<<" not in text
    return SHIM + text


def host_library(text: str) -> ctypes.CDLL:
    """For many runs of few kernels. (With -O1, g++ takes 10 s longer for convolutions, 16-bit
    matmuls and staged convolutions together, and their runs take 3 s less.)"""
    return loop_runs.compile_source(Source("host", text, ()), loop_runs.EMULATED)


def library_of(header: str, *more: str) -> ctypes.CDLL:
    """A kernel's own text with entries of a test."""
    return host_library(on_host("\n".join([*with_stand_in(header, set()), BY_COLUMNS, *more])))
