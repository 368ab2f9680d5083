"""The C entry point of a kernel: it binds arguments, chooses an instantiation and launches it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fusewright.codegen.form import Form, constants
from fusewright.codegen.lanes import indented
from fusewright.codegen.layout import COLUMNS, assignment, call, definition
from fusewright.codegen.text import identifier, size_in_doubles, size_text
from fusewright.ir.graph import ONE, ZERO, Dim, Ratio
from fusewright.ir.kernel import Kernel
from fusewright.ir.loop import Access
from fusewright.ir.operators import STORAGE_TYPES
from fusewright.schedule.flat import is_flat
from fusewright.schedule.index_width import NARROW_LIMIT, extents
from fusewright.schedule.loops import SMALL_TILE
from fusewright.schedule.vector_width import vector_axes, vectors
from fusewright.target.target import Target

FEWEST = 5  # pointers that have a macro


def bound_lines(form: Form, name: str, function: str = "fw::members") -> list[str]:
    """The definition of an object that holds the arguments of the entry in the order of the
    functor's members."""
    given = [form.pointers[each.name] for each in form.kernel.arguments]
    if given == [f"a{at}" for at in range(len(given))]:
        given = counted("a", len(given))
    given += list(form.symbols.values())
    numbers = {
        form.names[item.name]: size_in_doubles(item.value, form.symbols)
        for item in constants(form)
        if isinstance(item.value, Dim | Ratio)
    }
    lines = [
        line for each, text in numbers.items() for line in definition(f"const double {each}", text)
    ]
    return [*lines, *assignment(f"const auto {name}", function, [*given, *numbers], 2)]


def for_entry(form: Form, kernel: Kernel) -> Form:
    """The form with the pointers of the kernel's entry."""
    return replace(form, pointers=entry_pointers(kernel))


def entry_pointers(kernel: Kernel) -> dict[str, str]:
    """The names of an entry's pointers."""
    return {each.name: f"a{at}" for at, each in enumerate(kernel.arguments)}


def entry_lines(kernel: Kernel, symbols: Iterable[str], lines: Sequence[str]) -> list[str]:
    """The extern "C" function of a kernel with this body. It is also a built-in function of
    Python."""
    parameters = [identifier(kernel.name), *counted("void* a", len(kernel.arguments))]
    parameters += [f"int64_t {each}" for each in symbols]
    return [*call("", "FW_ENTRY", parameters, " {", 0), *lines, "}"]


def counted(name: str, count: int) -> list[str]:
    """name0, name1, …: a few are written out, and more have a macro (`list_macros`)."""
    if count < FEWEST:
        return [f"{name}{at}" for at in range(count)]
    return [f"FW_LIST_{count}({name})"]


def list_macros(lines: Iterable[str]) -> list[str]:
    """The definitions of the macros that these lines need, each by the one before."""
    found = (int(each) for line in lines for each in re.findall(r"\bFW_LIST_(\d+)\(", line))
    most = max(found, default=0)
    if not most:
        return []
    first = ", ".join(f"A##{at}" for at in range(FEWEST))
    made = [f"#define FW_LIST_{FEWEST}(A) {first}"]
    for at in range(FEWEST, most):
        made.append(f"#define FW_LIST_{at + 1}(A) FW_LIST_{at}(A), A##{at}")
    return made


def function(form: Form, target: Target) -> list[str]:
    """The extern "C" function."""
    kernel, form = form.kernel, for_entry(form, form.kernel)
    calls = _host_calls(form) if target.language == "host" else _cuda_calls(form)
    lines = [*bound_lines(form, "body", f"fw::functor<{kernel.name}_body>"), *calls]
    return entry_lines(kernel, form.symbols.values(), indented(lines))


def returned(name: str, arguments: Sequence[str], tests: Sequence[str] = ()) -> list[str]:
    """`return name(arguments);`, if the tests hold."""
    condition = f"if ({' && '.join(tests)})"
    short = f"return {name}({', '.join(arguments)});"
    if not tests:
        return call("return ", name, arguments, ";", 2)
    if len(condition) + len(short) + 3 <= COLUMNS:
        return [f"{condition} {short}"]
    return [condition, *indented(call("return ", name, arguments, ";", 4))]


def all_of(name: str, tests: Sequence[str]) -> list[str]:
    """The definition of a flag: whether all these tests hold."""
    short = f"const bool {name} = {' && '.join(tests)};"
    if len(short) + 2 <= COLUMNS:
        return [short]
    first, *others = tests
    return [f"bool {name} = {first};", *(f"{name} &= {each};" for each in others)]


def _host_calls(form: Form) -> list[str]:
    schedule, body = form.schedule, "body.of<int64_t>()"
    if schedule.kind == "pointwise":
        return returned("fw::pointwise", [body, "where"])
    template = f"fw::{schedule.kind}<{schedule.lanes}>"
    if form.scans:
        return returned(template, [body, "where"])
    return returned(template, [body, str(schedule.splits), "workspace", "where"])


def _cuda_calls(form: Form) -> list[str]:
    """At most three instantiations: vectors with 32-bit indices, vectors with 64-bit indices, and
    single elements. The last is rare if only misaligned or unexpectedly large tensors need it."""
    lanes = form.schedule.lanes
    narrow, whole = narrow_tests(form), vector_tests(form) if lanes > 1 else []
    lines = all_of("narrow", narrow) if narrow else []
    lines += all_of("vectors", whole) if whole else []
    only = None if narrow else "int64_t" if narrow is None else "int"
    tests = ["vectors"] if whole else []
    made: list[tuple[list[str], str, int]] = []
    if only is None:
        made.append(([*tests, "narrow"], "int", lanes))
    if only or form.schedule.wide_index or lanes == 1:
        made.append((tests, only or "int64_t", lanes))
    if made[-1][0]:
        made.append(([], only or "int64_t", 1))
    expected = form.schedule.wide_index if lanes == 1 else _sizes_decide(form, whole)
    for tests, index, width in made:
        found = returned(*_launch(form, index, width), tests)
        rare = not tests and len(made) > 1 and not expected
        lines += ["#if FW_RARE", *found, "#else", "return fw::kRare;", "#endif"] if rare else found
    return lines


def _sizes_decide(form: Form, tests: Sequence[str]) -> bool:
    """Whether these tests of vectors depend on more than where buffers begin."""
    offsets = (each for item, _ in vectors(form.kernel, form.schedule.kind) for each in item.offset)
    return any(" % " in test for test in tests) or not all(each.is_static for each in offsets)


def _launch(form: Form, index: str, lanes: int) -> tuple[str, list[str]]:
    """The driver and its arguments."""
    schedule, body = form.schedule, f"body.of<{index}>()"
    unroll, cached, shared = schedule.unroll, schedule.cached, schedule.shared
    if lanes < schedule.lanes:
        # Single elements are not copied to shared memory: each sweep reads them again. A row in
        # registers must still fit. Otherwise more single elements are loaded at once.
        cached, shared = cached and not shared, 0
        column = schedule.kind in ("column", "transpose_column")
        if not form.scans and not (cached and column):
            unroll = unroll * schedule.lanes if cached else max(4, unroll)
    if schedule.kind == "pointwise":
        numbers = f"{lanes}, {schedule.threads}, {unroll}"
        driver = "flat" if schedule.flat and lanes > 1 else "pointwise"
        return f"fw::{driver}<{index}, {numbers}>", [body, "where", "stream"]
    if schedule.kind in ("transpose", "transpose_row"):
        # Single elements need more addresses per thread, so their tile is small.
        tile = schedule.tile if lanes == schedule.lanes else SMALL_TILE
        numbers = f"{lanes}, {tile}, {schedule.threads}"
        if schedule.kind == "transpose":
            return f"fw::transpose<{index}, {numbers}>", [body, "where", "stream"]
    elif schedule.cluster > 1 and shared:
        numbers = f"{lanes}, {schedule.threads}, {unroll}, {shared}, {schedule.cluster}"
        numbers += f", {str(schedule.flat).lower()}, {str(schedule.stays).lower()}"
        return f"fw::cluster_row<{index}, {numbers}>", [body, "workspace", "where", "stream"]
    elif schedule.kind == "row":
        beyond = schedule.beyond * schedule.lanes // lanes
        shape = f"{lanes}, {schedule.threads}, {schedule.rows}, {unroll}"
        numbers = f"{shape}, {str(cached).lower()}, {beyond}, {shared}"
    elif schedule.kind == "scan":
        numbers = f"{lanes}, {schedule.threads}, {schedule.rows}, {unroll}"
    else:
        across = schedule.across
        numbers = f"{lanes}, {across}, {schedule.threads // across}, {unroll}"
        if cached:
            driver = "held_column" if schedule.kind == "column" else schedule.kind
            return f"fw::{driver}<{index}, {numbers}>", [body, "where", "stream"]
    driver = schedule.kind if form.transposed_inner is None else "transpose_within"
    arguments = [body, str(schedule.splits), "workspace", "where", "stream"]
    return f"fw::{driver}<{index}, {numbers}>", arguments


def narrow_tests(form: Form) -> list[str] | None:
    """Whether every index and offset fits into 32 bits, as tests of symbols. None if not."""
    found: dict[tuple[Dim, ...], int] = {}
    for terms in extents(form.kernel):
        fixed = sum(term.factor for term in terms if term.is_static)
        moving = tuple(term for term in terms if not term.is_static)
        if fixed >= NARROW_LIMIT:
            return None
        if moving:
            found[moving] = max(fixed, found.get(moving, 0))
    largest = [each for each in found.items() if not _follows(each, found)]
    return [
        f"{' + '.join(size_text(term, form.symbols) for term in moving)} < {NARROW_LIMIT - fixed}"
        for moving, fixed in largest
    ]


def _follows(test: tuple[tuple[Dim, ...], int], tests: Mapping[tuple[Dim, ...], int]) -> bool:
    """Whether a test holds if another one does: of a multiple of the same term."""
    (term, *others), fixed = test
    if others or term.factor <= 0:
        return False
    return any(
        len(more) == 1
        and more[0].symbols == term.symbols
        and more[0].factor > term.factor
        and other >= fixed
        for more, other in tests.items()
    )


def vector_tests(form: Form, new: Collection[str] = ()) -> list[str]:
    """Whether vectors are whole and aligned, as tests of pointers and symbols. `new` buffers are
    allocated by us and therefore aligned."""
    schedule, kernel = form.schedule, form.kernel
    alone = schedule.kind == "pointwise" and len(kernel.outer) == 1
    axes = vector_axes(kernel, schedule.kind)
    steps = [] if alone or schedule.flat else [kernel.axes[axis].size for axis in axes]
    moved: dict[str, None] = {}
    whole: dict[str, dict[str, None]] = {}  # pointers by type
    for access, axis in vectors(kernel, schedule.kind):
        if access.strides[axis] != ONE or (schedule.flat and not is_flat(kernel, access)):
            continue
        if not schedule.flat:
            steps += [stride for at, stride in enumerate(access.strides) if at != axis]
        if access.offset:
            moved[_aligned(form, access)] = None
        elif access.buffer not in new:
            whole.setdefault(_storage(form, access), {})[form.pointers[access.buffer]] = None
    tests = [
        test
        for storage, pointers in whole.items()
        for test in _all_aligned(f"fw::all_aligned<{storage}, {schedule.lanes}>", list(pointers))
    ]
    divided = [
        f"{size_text(step, form.symbols)} % {schedule.lanes} == 0"
        for step in steps
        if step.divided_by(schedule.lanes) is None and step != ZERO
    ]
    return [*tests, *moved, *dict.fromkeys(divided)]


def _all_aligned(function: str, pointers: list[str]) -> Iterator[str]:
    """Calls with as many pointers as fit on a line."""
    room = COLUMNS - len(f"  bool vectors = {function}();")
    taken: list[str] = []
    for name in pointers:
        if taken and len(", ".join([*taken, name])) > room:
            yield f"{function}({', '.join(taken)})"
            taken = []
        taken.append(name)
    yield f"{function}({', '.join(taken)})"


def _storage(form: Form, access: Access) -> str:
    return next(
        STORAGE_TYPES[each.dtype] for each in form.kernel.arguments if each.name == access.buffer
    )


def _aligned(form: Form, access: Access) -> str:
    offset = " + ".join(size_text(each, form.symbols) for each in access.offset)
    vector = f"{_storage(form, access)}, {form.schedule.lanes}"
    return f"fw::aligned<{vector}>({form.pointers[access.buffer]}, {offset})"
