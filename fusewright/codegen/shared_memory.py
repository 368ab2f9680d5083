"""The part of a row that is kept in shared memory. It is copied there without using registers.

`Held` has the loads with which a row begins. A load that only a later sweep needs is read in that
sweep.
"""

from __future__ import annotations

from fusewright.codegen.access import holder, read
from fusewright.codegen.form import Form, all_coordinates, decompose
from fusewright.codegen.lanes import function_lines, used
from fusewright.codegen.members import struct
from fusewright.schedule.sweeps import early_loads


def shared_parts(form: Form) -> list[list[str]]:
    """The struct `Held`, and the functions `fetch` and `take`."""
    loads = early_loads(form.kernel, form.plan)
    names = [form.names[item.name] for item in loads]
    kinds = [holder(form, item, True, "V") for item in loads]
    fields = list(zip(kinds, names, strict=True))
    at = all_coordinates(form, "row.")
    fetched = [
        read(form, item, True, f"held.{name}", at, "fetch")
        for item, name in zip(loads, names, strict=True)
    ]
    heads = used(decompose(form, form.kernel.inner, "j", "l"), fetched)
    fetch = "fetch(Held<V>& held, const Row<W>& row, I q, I l)"
    taken = [f"elem.{name} = held.{name};" for name in names]
    return [
        struct("Held", fields),
        function_lines("int V, int W", fetch, heads + fetched),
        function_lines("int V", "take(Elem<V>& elem, const Held<V>& held)", taken),
    ]
