"""Whether the programs of a model say what a real call of it did.

Programs and a `Witness` come in. Where only gradients differ, programs without gradients come out,
with the reason. Other differences are errors: the original forward is for such a model.
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.capture.witness import Key, Returned, Witness
from fusewright.errors import LeftToEagerError
from fusewright.ir.graph import Program, TensorSpec


def agreed(programs: tuple[Program, ...], seen: Witness) -> tuple[Program, ...]:
    """The programs, if what they say of the first call is what was seen."""
    first = programs[-1]
    _require_same_outputs(first, seen)
    _require_same_writes(first, seen)
    _require_same_draws(first, seen)
    reason = _lost_gradients(first, seen)
    return tuple(_without_gradients(each, reason) for each in programs) if reason else programs


def _require_same_outputs(program: Program, seen: Witness) -> None:
    """Tensors of the result have the same devices, dtypes, shapes and strides."""
    if len(program.returned) != len(seen.outputs):
        raise LeftToEagerError(
            f"a real call returns {len(seen.outputs)} tensors, and PyTorch's trace "
            f"{len(program.returned)}"
        )
    specs = _outputs(program)
    for at, (position, real) in enumerate(zip(program.returned, seen.outputs, strict=True)):
        if position is None:
            continue
        spec = specs[position]
        if spec.device.partition(":")[0] != real.device:
            raise LeftToEagerError(
                f"output {at} of a real call is on {real.device}, and PyTorch's trace says "
                f"{spec.device}"
            )
        shape, strides = (
            tuple(each.at(program.example_sizes) for each in sizes)
            for sizes in (spec.shape, spec.strides)
        )
        alike = (spec.dtype, shape) == (real.dtype, real.shape)
        if not alike or not _is_same_layout(strides, real):
            raise LeftToEagerError(
                f"output {at} of a real call is {real.dtype}{list(real.shape)} with strides "
                f"{real.strides}, and PyTorch's trace says {spec.dtype}{list(shape)} with strides "
                f"{strides}"
            )


def _outputs(program: Program) -> dict[int, TensorSpec]:
    """The specs of the tensors among the outputs, by position."""
    specs = program.inference.specs()
    named = zip(program.results, program.inference.outputs, strict=False)
    found = {
        result.index: specs[name]
        for result, name in named
        if result.kind == "output" and isinstance(name, str)
    }
    return {at: spec for at, spec in found.items() if spec is not None}


def _is_same_layout(strides: tuple[int, ...], real: Returned) -> bool:
    """Strides of dimensions of size one do not matter. A view of an input is returned as a copy."""
    if 0 in real.shape:
        return True
    matter = [at for at, size in enumerate(real.shape) if size != 1]
    return any(
        all(strides[at] == each[at] for at in matter) for each in (real.strides, real.copied)
    )


def _require_same_writes(program: Program, seen: Witness) -> None:
    keys = [seen.first_name(each.kind, each.path) for each in program.bindings]
    known = {keys[each.index] for each in program.results if each.kind == "mutation"}
    unknown = sorted(seen.written - known)
    if unknown:
        raise LeftToEagerError(
            f"a real call changes the {_named(unknown[0])}, and PyTorch's trace does not"
        )


def _require_same_draws(program: Program, seen: Witness) -> None:
    """Not the other way round: some operators draw only if their arguments say so."""
    if seen.drew and not any(node.random for node in program.forward.nodes):
        raise LeftToEagerError(
            "a real call draws random numbers that no result depends on, and PyTorch's trace none"
        )


def _lost_gradients(program: Program, seen: Witness) -> str:
    """Why the gradients are not those of a real call. Empty if they are."""
    if program.forward_only or seen.reached is None:
        return ""
    outputs = program.backward.outputs if program.backward else (None,) * len(program.bindings)
    named = [(seen.first_name(each.kind, each.path), each) for each in program.bindings]
    ours = {key for (key, _), gradient in zip(named, outputs, strict=True) if gradient is not None}
    ours |= {named[at][0] for at in program.attached}
    may = {key for key, each in named if each.differentiable} & seen.followed
    lost = sorted((seen.reached & may) - ours)
    if lost:
        return f"a real backward reaches the {_named(lost[0])}, and PyTorch's trace does not"
    added = sorted((ours & may & seen.wanted) - seen.reached)
    if added:
        return (
            f"PyTorch's trace has a gradient for the {_named(added[0])}, and a real call has none"
        )
    return ""


def _named(key: Key) -> str:
    kind, path = key
    return f"argument {path}" if kind == "input" else f"{kind} {path}"


def _without_gradients(program: Program, reason: str) -> Program:
    """The program for calls that want no gradients."""
    return replace(
        program,
        bindings=tuple(replace(each, differentiable=False) for each in program.bindings),
        forward=program.inference,
        results=tuple(each for each in program.results if each.kind != "saved"),
        backward=None,
        tangents=(),
        reach=(),
        forward_only=reason,
    )
