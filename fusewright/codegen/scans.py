"""The lanes of a functor's scans. A functor that scans has them instead of accumulators."""

from __future__ import annotations

from fusewright.codegen.form import Form
from fusewright.codegen.lanes import indented
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
        along = _each(names, "{0}.template along<kBackward>(scanned.{0}, n);")
        across = _each(names, "{0}.across(scanned.{0}, n);")
        carried += [
            "template <int W>",
            f"FW_FN void along(Scanned<W>& scanned, int n) {{ {along} }}",
            f"FW_FN void across(Scanned<V>& scanned, int n) {{ {across} }}",
        ]
        return [_struct("Scanned", fields), _struct("Carry", carried)]
    total = _each(names, "one.{0} = {0}.template total<kBackward>();")
    follow = _each(names, "{0}.follow(before.{0});")
    fields += [
        f"FW_FN void clear() {{ {_each(names, '{0}.clear();')} }}",
        f"FW_FN void along() {{ {_each(names, '{0}.template along<kBackward>();')} }}",
        f"FW_FN Scanned<1> total() const {{ Scanned<1> one; {total} return one; }}",
        "template <int W>",
        f"FW_FN void follow(const Scanned<W>& before) {{ {follow} }}",
    ]
    return [_struct("Scanned", fields)]


def _each(names: list[str], text: str) -> str:
    return " ".join(text.format(name) for name in names)


def _struct(name: str, fields: list[str]) -> list[str]:
    return ["template <int V>", f"struct {name} {{", *indented(fields), "};"]
