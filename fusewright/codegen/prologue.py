"""A convolution's prologue: a functor that computes an element of the input from its coordinates.

It is the loop before the convolution, without its store (kernels/convolution/computed_input.cuh).
Values that depend on image and channel alone, such as a batch norm's factor, are computed once for
many elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusewright.codegen.access import element, holder, read
from fusewright.codegen.entry import bound_lines, for_entry
from fusewright.codegen.equation import equations
from fusewright.codegen.form import Form, all_coordinates, part_form
from fusewright.codegen.functor import assembled, numbered
from fusewright.codegen.lanes import Computed, braced, computed, loaded_name, used
from fusewright.codegen.layout import declaration
from fusewright.codegen.members import elem_struct, struct
from fusewright.codegen.source import Functor
from fusewright.errors import CodegenError
from fusewright.ir.convolution import CHANNELS, ConvolutionKernel, is_contiguous_along
from fusewright.ir.loop import Load, LoopKernel, Store, reads
from fusewright.ir.weight_gradient import GradientKernel
from fusewright.schedule.choice import Schedule

Computing = ConvolutionKernel | GradientKernel

# The coordinates of an element, by the number of axes.
COORDINATES = {3: ("image", "channel", "x"), 4: ("image", "channel", "y", "x")}
COORDINATES[5] = ("image", "channel", "z", "y", "x")
PARAMETERS = "int image, int channel, int z, int y, int x"


def prologue_functor(kernel: Computing) -> Functor:
    named = _form(kernel)
    form = numbered(named)
    shared = form.fixed_along(slice(CHANNELS + 1, None))  # by all elements of an image's channel
    own = [item for item in _values(form) if item not in shared]
    loads = [item for item in own if isinstance(item, Load)]
    exported = [item for item in shared if _is_read(form, item.name, own)]
    fields = [(form.register(item.name), form.names[item.name]) for item in exported]
    parts = [
        [*elem_struct(form, loads), "using Raw = Elem<1>;"],
        struct("Factors", fields, ""),
        _read(form, loads),
        _factors(form, shared, exported),
        _value(form, own, exported),
    ]
    return assembled(form, named.names, parts)


def prologue_equations(kernel: Computing, name: str = "source") -> list[str]:
    """The equations of the computed input."""
    form, store = _form(kernel), _store(_form(kernel))
    named = {**form.pointers, store.access.buffer: name}
    letters = {3: "ncx", 4: "ncyx", 5: "nczyx"}[len(form.kernel.outer)]
    return equations(replace(form, pointers=named), axes=letters)


def computed_lines(kernel: Computing, name: str, channels: int) -> list[str]:
    """The definition of the computed input. A group has this many `channels`."""
    form = for_entry(_form(kernel), kernel)
    by_four = channels % 4 == 0 and is_contiguous_along(_loop(kernel), CHANNELS)
    # Offsets need 64 bits, because sizes may change.
    return [
        f"using Computed = {form.kernel.name}_body<int64_t>;",
        *bound_lines(form, "computed"),
        f"const fw::ComputedInput<Computed, {str(by_four).lower()}> {name}{{computed}};",
    ]


def _loop(kernel: Computing) -> LoopKernel:
    if (
        kernel.prologue is None
        or kernel.prologue.inner
        or len(kernel.prologue.outer) not in COORDINATES
    ):
        raise CodegenError(f"kernel {kernel.name}: the prologue does not run over the input")
    return kernel.prologue


def _form(kernel: Computing) -> Form:
    whole = _loop(kernel)
    read = (each for each in whole.arguments if not each.is_output)
    loop = replace(whole, name=f"{kernel.name}_source")
    taken = (*COORDINATES[5], "elem", "factors", "v")
    return part_form(kernel, loop, read, Schedule("pointwise", lanes=1), taken=taken)


def _values(form: Form) -> list[Computed]:
    return [item for item in form.kernel.body if isinstance(item, Computed)]


def _is_read(form: Form, name: str, own: Sequence[Computed]) -> bool:
    return name == _store(form).value or any(name in reads(item) for item in own)


def _store(form: Form) -> Store:
    (store,) = (item for item in form.kernel.body if isinstance(item, Store))
    return store


def _heads(form: Form, lines: list[str]) -> list[str]:
    """Definitions of the coordinates that these lines mention."""
    at = all_coordinates(form)
    pairs = zip(at, COORDINATES[len(at)], strict=True)
    return used([f"const I {name} = {coordinate};" for name, coordinate in pairs], lines)


def _function(form: Form, signature: str, lines: list[str]) -> list[str]:
    """A member function. It is a template because a host and device function that is not one may
    not call device functions."""
    kind, _, rest = signature.partition(" ")
    head = ["template <int V = 1>", *declaration(f"FW_DEVICE {kind} ", rest, " const")]
    return braced(head, [*_heads(form, lines), *lines])


def _read(form: Form, loads: list[Load]) -> list[str]:
    at = all_coordinates(form)
    lines = ["Raw elem;"]
    lines += [read(form, item, True, f"elem.{form.names[item.name]}", at) for item in loads]
    return _function(form, f"Raw read({PARAMETERS})", [*lines, "return elem;"])


def _factors(form: Form, shared: Sequence[Computed], exported: Sequence[Computed]) -> list[str]:
    at = all_coordinates(form)
    lines = ["constexpr int v = 0;"] if any(isinstance(item, Load) for item in shared) else []
    for item in shared:
        held = loaded_name(form, item)
        if isinstance(item, Load):
            lines.append(f"{holder(form, item, True, 'V')} {held};")
            lines.append(read(form, item, True, held, at))
        lines.append(computed(form, item, held, at))
    names = ", ".join(form.names[item.name] for item in exported)
    return _function(
        form, "Factors factors(int image, int channel)", [*lines, f"return {{{names}}};"]
    )


def _value(form: Form, own: Sequence[Computed], exported: Sequence[Computed]) -> list[str]:
    at = all_coordinates(form)
    lines = ["constexpr int v = 0;"] if any(isinstance(item, Load) for item in own) else []
    for item in exported:
        name = form.names[item.name]
        lines.append(f"const {form.register(item.name)} {name} = factors.{name};")
    lines += [computed(form, item, element(form, item, False), at) for item in own]
    signature = f"float value(const Raw& elem, const Factors& factors, {PARAMETERS})"
    return _function(form, signature, [*lines, f"return {form.names[_store(form).value]};"])
