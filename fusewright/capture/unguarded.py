"""What forward reads that our guards do not compare, found by Dynamo's trace of the same call.

One trace of ours stands for all calls that our guards accept. They compare tensors, plain
arguments, each module's class, flags, hooks and constants, and objects at watched places. Dynamo
lists everything that a forward reads. If something else is among it, a later call may need another
trace, and only Dynamo's own guards can tell. Some things Dynamo does not notice either.
"""

from __future__ import annotations

import dis
import functools
import logging
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo.utils import dynamo_timed, get_metrics_context

from fusewright import debug
from fusewright.capture.beside import NOTHING, Beside, content, is_plain, together
from fusewright.capture.caught import catches, noted_lookups
from fusewright.capture.reachable import Reachable, generators
from fusewright.capture.reads import Held, Reads, Watched, hides_changes
from fusewright.capture.silence import silenced
from fusewright.capture.trace import ONE_AT_A_TIME
from fusewright.runtime import altered

__all__ = ["Trust", "methods_of_objects", "trust", "worst"]

_PYTORCH = str(Path(torch.__file__).parent)
_PYTHON = str(Path(dis.__file__).parent)
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Tensor)
# Settings of the process that no guard of ours compares.
_ASKED = frozenset(
    "is_grad_enabled is_inference_mode_enabled are_deterministic_algorithms_enabled "
    "is_deterministic_algorithms_warn_only_enabled get_float32_matmul_precision "
    "is_autocast_enabled is_autocast_cpu_enabled get_autocast_dtype get_autocast_gpu_dtype "
    "get_autocast_cpu_dtype get_num_threads get_num_interop_threads get_default_device".split()
)
# Change a generator of the process, which a trace leaves out. Where a model can be called once as
# a witness, that call tells; not every model can.
_SEEDS = frozenset("manual_seed manual_seed_all set_rng_state set_rng_state_all fork_rng".split())
# Give a table of which Dynamo guards nothing.
_TABLES = frozenset(("globals", "locals"))
# Begins Dynamo's names in PyTorch's own code.
_PYTORCHS = "G['__import_torch_dot_"
# Facts of a tensor that no guard of ours compares. Dynamo does not notice some of them either.
_UNNOTICED = frozenset(
    "_version is_leaf grad_fn retains_grad output_nr storage_offset _base _is_view is_shared "
    "is_pinned".split()
)
_FACTS = _UNNOTICED | {"requires_grad", "grad"}
_MISSES = "where something is missing, and Dynamo does not notice when it is there"
# Attributes that hold one of a few objects, each the same for all.
_SINGLE = frozenset("dtype layout __class__ memory_format".split())
_OLD = torch.__version__ < "2.12"  # its Dynamo notices less: see `beside`
# Guards that agree if a name stands for the same object, with the same inside as far as it is read.
_ON_NAMES = frozenset(
    "TYPE_MATCH ID_MATCH CLASS_MATCH FUNCTION_MATCH CLOSURE_MATCH BUILTIN_MATCH MODULE_MATCH "
    "NN_MODULE CONSTANT_MATCH EQUALS_MATCH TENSOR_MATCH SEQUENCE_LENGTH DICT_KEYS_MATCH "
    "DICT_CONTAINS DICT_NOT_CONTAINS SET_CONTAINS SET_NOT_CONTAINS BOOL_MATCH NONE_MATCH "
    "NOT_NONE_MATCH HASATTR NOT_PRESENT_IN_GENERIC_DICT DUPLICATE_INPUT MAPPING_KEYS_CHECK "
    "EMPTY_NN_MODULE_HOOKS_DICT TUPLE_ITERATOR_LEN RANGE_ITERATOR_MATCH".split()
)
CONSTANT = frozenset("CONSTANT_MATCH EQUALS_MATCH".split())
# A module's tables of tensors.
_TENSORS = ("._parameters", "._buffers")
# Guards on the state of the process and on sizes, which our guards or `_ASKED` cover.
_ON_STATE = frozenset(
    "SHAPE_ENV GRAD_MODE DETERMINISTIC_ALGORITHMS GLOBAL_STATE TORCH_FUNCTION_STATE DEFAULT_DEVICE "
    "AUTOGRAD_SAVED_TENSORS_HOOKS FUNCTORCH_STACK_MATCH DUAL_LEVEL FSDP_TRAINING_STATE".split()
)


@dataclass(frozen=True)
class Trust:
    """Whether one trace can stand for later calls: the reason why not is empty if it can.

    `by_dynamo` if Dynamo's guards can tell for which calls a trace stands, together with what each
    call must look at `beside` them. `watched` has the objects that guards must find at their
    places; Dynamo does not look there. They are all that the `codes` need.
    """

    reason: str = ""
    by_dynamo: bool = True
    watched: tuple[Watched, ...] = ()
    beside: Beside = NOTHING
    codes: frozenset[types.CodeType] = frozenset()


def trust(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, witnessed: bool = False
) -> Trust:
    """Whether one trace of this call can stand for later calls.

    If it was `witnessed` that no numbers come from the generators of the process, the names of
    `random` and `numpy` alone are no reason.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    odd = {type(each).__name__ for each in leaves if _is_odd(each)}
    if odd:
        untraced = [Trust(f"forward takes a {min(odd)}"), *_of_names(model, False)]
        return _untraced(model, untraced)
    try:
        layers = torch._dynamo.config.patch(allow_rnn=True, ignore_logging_functions=_logging())
        times = get_metrics_context(), dynamo_timed("fusewright")
        # PyTorch 2.11 logs the settings at the end of `times`, and fails at these.
        with ONE_AT_A_TIME, silenced(), times[0], times[1], layers, noted_lookups() as caught:
            frame = convert_frame._get_frame(model, tuple(args), dict(kwargs))
            found = convert_frame.fullgraph_capture(model, tuple(args), dict(kwargs))
    except Exception as error:  # of the model, or Dynamo does not know what it does
        debug.log(1, "Dynamo cannot trace %s: %s", type(model).__name__, error)
        return _untraced(model, [*_of_names(model, witnessed)])
    captured = found.graph_capture_output
    own = [each for each in captured.traced_code if not each.co_filename.startswith(_PYTORCH)]
    reachable, names = Reachable(model), {name for each in own for name in each.co_names}
    reads, guards = Reads(model, frame), captured.output_graph.guards
    outside = any(
        isinstance(reads.value(name_of(each)), torch.Tensor)
        for each in guards
        if not name_of(each).startswith("L[")
    )
    drawn, reasons = _drawn(reachable, witnessed, own), [*_asked(names, outside)]
    if reachable.differentiates_twice():
        reasons.append(Trust("forward asks for gradients with create_graph=True", by_dynamo=False))
    reasons += drawn.reasons
    if _OLD and reachable.has_mutable_defaults(own):
        reasons.append(Trust("forward has a default argument that may change", by_dynamo=False))
    if sum(isinstance(each, torch.Tensor) for each in leaves) > 1:
        words = "asks whether two variables are the same object"
        reasons += [Trust(f"{each.co_name} {words}") for each in own if _compares_objects(each)]
    words = "asks whether an attribute is the same object as another one"
    mine = [each for each in own if not each.co_filename.startswith(_PYTHON)]
    reasons += [Trust(f"{each.co_name} {words}", False) for each in mine if _compares_held(each)]
    reasons += [Trust(f"{each} {_MISSES}", False) for each in caught]
    methods_of_objects(guards, reads)
    reasons += _reasons(guards, reads)
    if reasons:
        reasons += [*drawn.others, *_unnoticed(guards, reads)]
    watched = (*reads.watched.values(), *reachable.watched(own))
    return replace(worst(reasons), watched=watched, codes=frozenset(captured.traced_code))


def _untraced(model: nn.Module, reasons: Sequence[Trust]) -> Trust:
    """All places count for a model of which there is no trace by Dynamo."""
    reachable = Reachable(model)
    codes = frozenset(each.__code__ for each in reachable.functions)
    return replace(worst(reasons), watched=tuple(reachable.watched()), codes=codes)


def worst(found: Sequence[Trust]) -> Trust:
    """The reason that asks for most, with what all of them look at beside Dynamo."""
    most = min(found, key=lambda each: each.by_dynamo, default=Trust())
    return replace(most, beside=together(each.beside for each in found))


def _of_names(model: nn.Module, witnessed: bool) -> Iterator[Trust]:
    """The reasons for a model of which there is no trace by Dynamo."""
    reachable = Reachable(model)
    if reachable.differentiates_twice():
        yield Trust("forward asks for gradients with create_graph=True", by_dynamo=False)
    if _OLD and reachable.changes_classes():
        yield Trust("forward may change an attribute of a class", by_dynamo=False)
    drawn = _drawn(reachable, witnessed)
    found = [*drawn.reasons, *_asked(reachable.names, reachable.holds_state())]
    found += [Trust(f"forward may read {name}") for name in sorted(reachable.unguarded())]
    if found:
        words = "in which Dynamo notices no change"
        yield from (Trust(f"forward reads {x}, {words}", False) for x in reachable.unnoticed())
        catching = [each for each in reachable.functions if catches(each.__code__)]
        yield from (Trust(f"{x.__name__} catches errors {_MISSES}", False) for x in catching)
        yield from drawn.others
    yield from found


@dataclass(frozen=True)
class _Drawn:
    """Generators that forward may draw from: those that are a reason not to trust a trace, and
    others, which count if there is another reason."""

    reasons: tuple[Trust, ...]
    others: tuple[Trust, ...]


def _drawn(
    reachable: Reachable, witnessed: bool, codes: Sequence[types.CodeType] | None = None
) -> _Drawn:
    found = sorted(reachable.draws(codes))
    told = [
        (Trust(f"forward draws random numbers from {name}", dynamo), shared and witnessed)
        for name, shared, dynamo in found
    ]
    return _Drawn(tuple(t for t, o in told if not o), tuple(t for t, o in told if o))


def _is_odd(value: Any) -> bool:
    return type(value) not in _PLAIN and not isinstance(value, torch.Tensor)


def _asked(names: set[str], outside: bool) -> Iterator[Trust]:
    """Why code that uses these names needs other guards. `outside`: it reads tensors that belong
    neither to the model nor to the call."""
    for name in sorted(names & _FACTS):
        old = _OLD and name == "requires_grad"
        noticed = name not in _UNNOTICED and not (old and outside)
        words = f"forward reads {name} of a tensor"
        yield Trust(words, by_dynamo=noticed, beside=Beside(gradients=old))
    for name in sorted(names & _TABLES):
        yield Trust(f"forward may call {name}()", by_dynamo=False)
    for name in sorted(names & _SEEDS):
        yield Trust(f"forward calls {name}, which changes a random generator")
    for name in sorted(names & _ASKED):
        yield Trust(f"forward asks torch.{name}()")


def _compares_objects(code: types.CodeType) -> bool:
    """Whether there is `a is b` of two variables."""
    steps = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    loads = [each.opname.startswith("LOAD_FAST") or each.opname == "LOAD_DEREF" for each in steps]
    pairs = [each.opname.count("LOAD_FAST") == 2 for each in steps]  # since Python 3.13
    return any(
        step.opname == "IS_OP" and (all(loads[at - 2 : at]) or pairs[at - 1])
        for at, step in enumerate(steps)
    )


def _compares_held(code: types.CodeType) -> bool:
    """Whether there is `a is b` of an attribute and a variable or attribute. Whether two attributes
    become the same object, neither our guards nor Dynamo's tell."""
    steps = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    for at, step in enumerate(steps):
        if step.opname == "IS_OP":
            right = _path(steps[:at])
            left = _path(steps[: at - len(right)]) if right else ()
            told = left and right and len(left) + len(right) > 2
            if told and not {left[-1], right[-1]} & _SINGLE:
                return True
    return False


def _path(steps: Sequence[dis.Instruction]) -> tuple[str, ...]:
    """The names of the path, such as self.a.b, that these steps end with; empty for others."""
    names: list[str] = []
    for step in reversed(steps):
        names.insert(0, str(step.argval))
        if step.opname.startswith("LOAD_FAST") and step.opname.count("LOAD_FAST") == 1:
            return tuple(names)
        if step.opname != "LOAD_ATTR":
            break
    return ()


def _reasons(guards: Any, reads: Reads) -> Iterator[Trust]:
    kinds = generators()
    for guard in guards:
        name = name_of(guard)
        kind = guard.create_fn_name()
        if not name and kind in _ON_STATE:
            continue
        held, value = reads.held(name)
        if isinstance(value, kinds):
            yield Trust(f"forward draws random numbers from {_spelt(name)}", by_dynamo=False)
        if not name.startswith(_PYTORCHS) and getattr(value, "__name__", "") in _ASKED:
            yield Trust(f"forward asks torch.{value.__name__}()")
        if kind not in _ON_NAMES or not _is_compared(guard, kind, (held, value), reads):
            cells = [*_cells(name, reads)] if _OLD else []
            beside = Beside(tuple(each for each in cells if each is not None))
            words = f"forward reads {_spelt(name)}"
            yield Trust(words, by_dynamo=all(map(_is_plain, cells)), beside=beside)


def methods_of_objects(guards: Any, reads: Reads) -> None:
    """Watch the methods of objects that forward calls."""
    for guard in guards:
        name, asked = name_of(guard), guard.create_fn_name() == "NOT_PRESENT_IN_GENERIC_DICT"
        if asked and not isinstance(reads.value(name), nn.Module):
            reads.watch_method(name, _given(guard))


def _is_plain(cell: types.CellType | None) -> bool:
    """Whether a call can see that an enclosed variable is as before."""
    return cell is not None and is_plain(content(cell))


def _cells(name: str, reads: Reads) -> Iterator[types.CellType | None]:
    """The enclosed variables on the way to a value; None for one that is not found."""
    code, closure = reads.frame.code, reads.frame.closure or ()
    first = name.split("'")[1] if "'" in name else ""
    if first in code.co_freevars:
        yield closure[code.co_freevars.index(first)]
    for end in re.finditer(r"\.cell_contents", name):
        cell = reads.value(name[: end.start()])
        yield cell if isinstance(cell, types.CellType) else None


def _unnoticed(guards: Any, reads: Reads) -> Iterator[Trust]:
    """Why Dynamo's guards would not do either."""
    for guard in guards:
        name = name_of(guard)
        if guard.create_fn_name() in CONSTANT and hides_changes(reads.value(name)):
            yield Trust(f"forward reads {_spelt(name)}, in which Dynamo notices no change", False)


def _is_compared(guard: Any, kind: str, found: tuple[Held, Any], reads: Reads) -> bool:
    """Whether our guards compare what this guard of Dynamo compares."""
    given = _given(guard)
    if kind == "HASATTR":
        # Before PyTorch 2.12, the name is that of the attribute, not of the owner.
        owner, name = reads.owner(name_of(guard)) if given is None else (found, str(given))
        if hasattr(owner[1], name):
            return reads.attribute(owner, name)[0] is not Held.ANYTHING
        return owner[0] is not Held.ANYTHING and reads.absent(owner, name)
    held, value = found
    if held is Held.ANYTHING:
        return False
    if kind == "DICT_KEYS_MATCH" and name_of(guard).endswith(_TENSORS):
        # Ours find the tensors that were there; they do not look for more. But hooks of
        # torch.nn.utils, such as weight_norm's, put their tensor into the table at each call.
        owner = reads.owner(name_of(guard))[0][1]
        return isinstance(owner, nn.Module) and any(altered._fw_hooks(owner))
    if kind == "DUPLICATE_INPUT":
        return reads.held(name_of(given))[0] is not Held.ANYTHING
    if kind == "NOT_PRESENT_IN_GENERIC_DICT":
        # An attribute that hides a method; guards look for a `forward` of PyTorch's layers.
        pytorchs = isinstance(value, nn.Module) and altered._fw_is_pytorchs(type(value))
        return pytorchs or reads.absent(found, str(given))
    return True


def _logging() -> set[Any]:
    """The methods of loggers, with those that packages have added: a trace that lists what
    forward reads need not know what they do."""
    added = [each for each in vars(logging.Logger).values() if callable(each)]
    return {*torch._dynamo.config.ignore_logging_functions, *added}


def _given(guard: Any) -> Any:
    """What a guard compares with, such as the name of an attribute."""
    more = guard.create_fn
    if not isinstance(more, functools.partial):
        return None
    return next(iter((*more.args, *more.keywords.values())), None)


def name_of(source: Any) -> str:
    """A property or, before PyTorch 2.12, a method."""
    return str(source.name if isinstance(source.name, str) else source.name())


def _spelt(name: str) -> str:
    """Dynamo's name for a value, as the user would write it."""
    name = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", name)
    name = re.sub(r"dict\(type\(([^()]*)\)\.__dict__\)\['(\w+)'\]", r"\1.\2", name)
    name = re.sub(r"\._modules\['(\w+)'\]", r".\1", name)
    name = re.sub(r"G\['__import_(\w+)'\]", lambda each: each[1].replace("_dot_", "."), name)
    return re.sub(r"[LG]\['([^']+)'\]", r"\1", name)
