"""The first lines of a functor's functions.

Most have a macro of kernels/scalar/functors.hpp. The others are written out.
"""

from __future__ import annotations

import re

from fusewright.codegen.layout import declaration

_LANES, _SWEEP = "int V", "int V, int W, class Acc"
_MACROS = {
    (_LANES, "load(Elem<V>& elem, I q, I l)"): "FW_LOAD()",
    (_LANES, "visit(const Elem<V>& elem, I q, I l, int n)"): "FW_VISIT()",
    (_LANES, "begin(Row<V>& row, I q, I l, int n)"): "FW_BEGIN()",
    (
        "int K, int V, int W",
        "load(fw::Phase<K>, Elem<V>& elem, const Row<W>& row, I q, I l)",
    ): "FW_LOADS()",
    (
        _SWEEP,
        "visit(fw::Phase<0>, const Elem<V>& elem, const Factors& factors, const Row<W>& row, "
        "Acc& acc, I q, I l, int n)",
    ): "FW_END()",
    (_LANES, "store(const Row<V>& row, int n)"): "FW_STORE()",
}
_OF_PHASE = {
    (
        _SWEEP,
        "visit(fw::Phase<k>, const Elem<V>& elem, const Row<W>& row, Acc& acc, I q, I l, int n)",
    ): "FW_SWEEP",
    (
        _SWEEP,
        "visit(fw::Phase<k>, Elem<V>& elem, const Row<W>& row, Acc& acc, I q, I l, int n)",
    ): "FW_KEEPING_SWEEP",
    (
        "int V, class Acc",
        "finish(fw::Phase<k>, Row<V>& row, const Acc& acc, int n)",
    ): "FW_FINISH",
}
_PHASE = re.compile(r"fw::Phase<(\d+)>")


def head(template: str, signature: str) -> list[str]:
    """The lines before the body of a function that is const and returns nothing."""
    if macro := _MACROS.get((template, signature)):
        return [f"{macro} {{"]
    if phase := _PHASE.search(signature):
        macro = _OF_PHASE.get((template, _PHASE.sub("fw::Phase<k>", signature)))
        if macro:
            return [f"{macro}({phase[1]}) {{"]
    return [f"template <{template}>", *declaration("FW_DEVICE void ", signature, " const")]
