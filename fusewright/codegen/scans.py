"""The lanes of a functor's scans. A functor that scans has them instead of accumulators."""

from __future__ import annotations

from fusewright.codegen.form import Form
from fusewright.codegen.lanes import braced, indented
from fusewright.ir.loop import Scan
from fusewright.ir.operators import SCANS


def scan_lines(form: Form, items: tuple[Scan, ...]) -> list[str]:
    """Statements that store lane v of the scans' operands, in the sweep before them."""
    return [f"scanned.{form.names[x.name]}_lanes.at[v] = {form.names[x.operand]};" for x in items]


def scanned_parts(form: Form) -> list[list[str]]:
    """`Scanned`, and on the host `Carry`: the state between one run of lanes and the next."""
    names = [f"{form.names[item.name]}_lanes" for item in form.scans]
    rules = [f"fw::{SCANS[item.kind][0]}<{form.register(item.name)}>" for item in form.scans]
    fields = [f"fw::Scanned<{rule}, V> {name};" for rule, name in zip(rules, names, strict=True)]
    if form.language == "host":
        carried = [f"fw::Carry<{rule}, V> {name};" for rule, name in zip(rules, names, strict=True)]
        along = [f"{each}.template along<kBackward>(scanned.{each}, n);" for each in names]
        across = [f"{each}.across(scanned.{each}, n);" for each in names]
        carried += _function("along(Scanned<W>& scanned, int n)", along, "template <int W>")
        carried += _function("across(Scanned<V>& scanned, int n)", across)
        return [_struct("Scanned", fields), _struct("Carry", carried)]
    total = [f"one.{each} = {each}.template total<kBackward>();" for each in names]
    follow = [f"{each}.follow(before.{each});" for each in names]
    along = [f"{each}.template along<kBackward>();" for each in names]
    fields += _function("clear()", [f"{each}.clear();" for each in names])
    fields += _function("along()", along)
    one = ["Scanned<1> one;", *total, "return one;"]
    fields += braced(["FW_FN Scanned<1> total() const {"], one)
    fields += _function("follow(const Scanned<W>& before)", follow, "template <int W>")
    return [_struct("Scanned", fields)]


def _function(signature: str, lines: list[str], *template: str) -> list[str]:
    return braced([*template, f"FW_FN void {signature} {{"], lines, indent=4)


def _struct(name: str, fields: list[str]) -> list[str]:
    return ["template <int V>", f"struct {name} {{", *indented(fields), "};"]
