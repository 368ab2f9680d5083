"""One Python function per kernel: it allocates the outputs and calls the kernel's C entry.

Its tensors are named `a0`, `a1` and so on, as in the C++ of the entry point.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusewright.codegen.source import Entry
from fusewright.emit import python
from fusewright.emit.bundle import ModuleBundle
from fusewright.emit.python import call, dims, dtype, identifiers, quoted
from fusewright.emit.steps import IN_PLACE, Demands, WrapperCall, wants
from fusewright.errors import CodegenError
from fusewright.ir.graph import ITEM_BYTES, Dim, TensorSpec, contiguous_strides
from fusewright.plan.steps import Fused, Plan, Step, inputs_of

# Alignment in bytes of outputs that share an allocation: a multiple of a cache line and of the
# widest access.
ALIGNMENT = 256
_Key = tuple[str, tuple[TensorSpec, ...]]


@dataclass(frozen=True)
class Wrapper:
    """A kernel's function. It is `optional` if some caller does not want all of its outputs.

    `over` pairs outputs with the inputs that they may overwrite, by their positions. `together`:
    whether one allocation holds all outputs.
    """

    name: str
    step: Fused
    entry: Entry
    outputs: tuple[TensorSpec, ...]
    optional: bool
    over: tuple[tuple[int, int], ...] = ()
    together: bool = False

    @property
    def input_names(self) -> list[str]:
        return [f"a{at}" for at in range(len(self.step.inputs))]

    @property
    def output_names(self) -> list[str]:
        first = len(self.step.inputs)
        return [f"a{at}" for at in range(first, len(self.entry.arguments))]

    @property
    def symbols(self) -> tuple[str, ...]:
        used = [size for spec in self.outputs for size in (*spec.shape, *spec.strides)]
        extra = python.symbols_in([*used, *self.entry.workspace.dims])
        return tuple(dict.fromkeys((*self.entry.symbols, *extra)))


def wrappers_of(
    bundle: ModuleBundle,
    plans: Iterable[tuple[Plan, Demands]],
    taken: frozenset[str],
    targets: Mapping[Fused, Mapping[str, str]],
) -> dict[Fused, Wrapper]:
    """A wrapper for each kernel. The same kernel with the same outputs has one wrapper."""
    entries = {entry.name: entry for entry in bundle.source.entries}
    read = [(_Reads.of(plan), found) for plan, found in plans]
    steps = [(step, reads, found) for reads, found in read for step in reads.plan.kernels]
    keys = {step: (step.kernel.name, reads.outputs(step)) for step, reads, _ in steps}
    partial = {keys[step] for step, _, found in steps if wants(step, found) is not None}
    separate = {keys[step] for step, reads, _ in steps if not _may_share_memory(step, reads)}
    over = _overwritten(keys, targets)
    made: dict[_Key, Wrapper] = {}
    names = set(taken)
    for step, _, _ in steps:
        kernel, outputs = key = keys[step]
        if key not in made:
            if kernel not in entries:
                raise CodegenError(f"the source has no entry for kernel {kernel!r}")
            name = _wrapper_name(step.name, names)
            names.add(name)
            into = over.get(key, ())
            entry, optional = entries[kernel], key in partial
            together = not (key in separate or optional or into)
            made[key] = Wrapper(name, step, entry, outputs, optional, into, together)
    return {step: made[key] for step, key in keys.items()}


def calls_of(
    wrappers: Mapping[Fused, Wrapper], targets: Mapping[Fused, Mapping[str, str]]
) -> dict[Fused, WrapperCall]:
    return {
        step: WrapperCall(each.name, each.symbols, bool(each.over) and step in targets)
        for step, each in wrappers.items()
    }


def _overwritten(
    keys: Mapping[Fused, _Key], targets: Mapping[Fused, Mapping[str, str]]
) -> dict[_Key, tuple[tuple[int, int], ...]]:
    """The outputs of each wrapper with the inputs that they may overwrite: what all of the steps
    agree on that overwrite anything."""
    found: dict[_Key, set[tuple[int, int]]] = {}
    for step, held in ((each, held) for each, held in targets.items() if each in keys):
        pairs = {(step.outputs.index(v), step.inputs.index(buffer)) for v, buffer in held.items()}
        found[keys[step]] = found.get(keys[step], pairs) & pairs
    return {key: tuple(sorted(pairs)) for key, pairs in found.items()}


@dataclass(frozen=True)
class _Reads:
    """A plan, the specs of its values, and the steps that read each of them."""

    plan: Plan
    specs: Mapping[str, TensorSpec]
    readers: Mapping[str, Sequence[Step]]

    @staticmethod
    def of(plan: Plan) -> _Reads:
        readers: dict[str, list[Step]] = {}
        for step in plan.steps:
            for name in dict.fromkeys(inputs_of(step)):
                readers.setdefault(name, []).append(step)
        return _Reads(plan, dict(plan.specs), readers)

    def outputs(self, step: Fused) -> tuple[TensorSpec, ...]:
        return tuple(self.specs[name] for name in step.outputs)


def _may_share_memory(step: Fused, reads: _Reads) -> bool:
    """Whether only kernels read the outputs, and each of these kernels reads all of them.

    Then addresses suffice, and all outputs can be freed at the same time.
    """
    made, specs = frozenset(step.outputs), reads.outputs(step)
    readers = [each for name in made for each in reads.readers.get(name, ())]
    return (
        len(made) > 1
        and bool(readers)
        and made.isdisjoint(reads.plan.outputs)
        and all(isinstance(each, Fused) and made <= set(each.inputs) for each in readers)
        # A wrapper gets the device from its first tensor.
        and not any(inputs_of(each)[0] in made for each in readers)
        and all(each.strides == contiguous_strides(each.shape) for each in specs)
        and all(size.divided_by(ALIGNMENT) is not None for size in _bytes_of(specs)[:-1])
    )


def _bytes_of(specs: Sequence[TensorSpec]) -> list[Dim]:
    return [each.numel * ITEM_BYTES[each.dtype] for each in specs]


def _wrapper_name(name: str, taken: set[str]) -> str:
    stem = name.removeprefix("custom_")
    (word,) = identifiers([f"k_{stem}"]).values()
    chosen = wanted = "custom_" + word.removeprefix("k_")
    count = 1
    while chosen in taken:
        count += 1
        chosen = f"{wanted}_{count}"
    return chosen


def wrapper_lines(wrapper: Wrapper, language: str) -> list[str]:
    """The definition of one wrapper."""
    step, entry = wrapper.step, wrapper.entry
    inputs, outputs = wrapper.input_names, wrapper.output_names
    if len(outputs) != len(step.outputs):
        raise CodegenError(f"entry {entry.name!r} and step {step.name!r} have different arguments")
    parameters = [*(inputs or ["device"]), *wrapper.symbols]
    if wrapper.optional:
        parameters.append(f"want=(True,) * {len(outputs)}")
    parameters += [f"{IN_PLACE}=False"] if wrapper.over else []
    body = [*_allocations(wrapper, language), *_terms(entry)]
    if entry.workspace:
        body += _memory("workspace", language, f"({entry.workspace},)", "(1,)", "torch.uint8")
    body += _launch(wrapper, language, inputs, outputs)
    if inputs and python.mentions(body, "device"):
        body.insert(0, f"device = {inputs[0]}.device")
    body.append(f"return {', '.join(outputs)}")
    return python.function(wrapper.name, parameters, "", body)


def _memory(target: str, language: str, *layout: str) -> list[str]:
    """A new tensor. The host has one device, so it is not passed (saves 0.4 µs)."""
    if language == "host":
        return call(target, "_fw_host_memory", layout)
    return call(target, "_fw_memory", [*layout, "device"])


def _allocations(wrapper: Wrapper, language: str) -> list[str]:
    """Memory for the outputs."""
    if wrapper.together:
        return _one_allocation(wrapper.output_names, _bytes_of(wrapper.outputs), language)
    lines, inputs, over = list[str](), wrapper.input_names, dict(wrapper.over)
    for index, (name, spec) in enumerate(zip(wrapper.output_names, wrapper.outputs, strict=True)):
        layout = [dims(spec.shape), dims(spec.strides), dtype(spec.dtype)]
        own = _memory(name, language, *layout)
        if wrapper.optional:
            own = call(name, "_fw_wanted", [f"want[{index}]", *layout, "device"])
        if index in over:
            own = [
                f"{name} = {inputs[over[index]]} if {IN_PLACE} else {own[0].partition(' = ')[2]}"
            ]
        lines += own
    return lines


def _one_allocation(names: Sequence[str], sizes: Sequence[Dim], language: str) -> list[str]:
    whole = " + ".join(map(str, sizes))
    lines = ["# Kernels alone read the outputs: one allocation holds them all."]
    lines += _memory(names[0], language, f"({whole},)", "(1,)", "torch.uint8")
    before = f"{names[0]}.data_ptr()"
    for name, size in zip(names[1:], sizes, strict=False):
        lines += call(name, "_FwAddress", [f"{before} + {size}"])
        before = name
    return lines


def _terms(entry: Entry) -> list[str]:
    """Lines that ask for the number of terms of a kernel on tensor cores."""
    of = entry.instead
    if of is None:
        return ["terms = _fw_terms()"] if entry.terms else []
    sizes = [each for spec in (of.source, of.weight) for each in (spec.shape, spec.strides)]
    args = [quoted(of.which), *map(dims, sizes), str(of.numbers), "device"]
    return [*call("asked", "_FwPass", args), "terms = _fw_convolution_terms(asked)"]


def _launch(wrapper: Wrapper, language: str, inputs: list[str], outputs: list[str]) -> list[str]:
    entry = wrapper.entry
    function = f"_fw_kernels.{entry.name}{'[terms]' if entry.terms else ''}"
    workspace = "workspace" if entry.workspace else "None"
    on_gpu = ["device.index", "_fw_stream(device.index)"]
    where = on_gpu if language == "cuda" else ["_fw_threads()", "None"]
    return call("", function, [*inputs, *outputs, *entry.symbols, workspace, *where])
