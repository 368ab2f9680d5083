"""One call of an optimized module: finds the program that fits and runs it under autograd."""

import typing
import warnings

import torch

from fusewright.runtime.altered import _fw_altered, _fw_looked, _fw_unaltered
from fusewright.runtime.guard import (
    _FW_UNKNOWN,
    _fw_autocast,
    _fw_driven,
    _fw_flatten,
    _fw_function_modes,
    _fw_likeness,
    _fw_positional,
    _fw_same_strides,
    _fw_sees_functions,
    _fw_watcher,
)
from fusewright.runtime.library import _fw_profiler, _fw_show

_fw_drive = typing.Callable[..., typing.Any]
_fw_tensors = tuple[torch.Tensor, ...]
_fw_given = tuple[typing.Any, ...]
_fw_named = dict[str, typing.Any]
_fw_compiling: _fw_drive = torch.compiler.is_compiling
_FW_ONCE = (
    "Fusewright's kernels compute first derivatives only; for create_graph=True or a gradient of a "
    "gradient, call the original model"
)


class _FwSecondDerivative(RuntimeError):
    """A gradient was requested that could itself be differentiated."""


_FW_WARNED: set[str] = set()
_fw_grad_mode: _fw_drive = torch.is_grad_enabled
_fw_increment: typing.Any = torch.autograd.graph.increment_version
_fw_forward_ad: typing.Any = torch.autograd.forward_ad
# Dispatch modes that torch.compile ignores, such as selective checkpoints', show no dispatch key.
_fw_modes: _fw_drive = torch._C._len_torch_dispatch_stack
# How many kinds of call a program remembers: full batches and the last, smaller one, for example.
_FW_KINDS = 4


def _fw_warn(reason: str) -> None:
    """Warn that the kernels are not used, once for each reason."""
    if not _fw_compiling() and reason not in _FW_WARNED:
        _FW_WARNED.add(reason)
        warnings.warn(f"the original forward runs: {reason}", RuntimeWarning, stacklevel=3)


def _fw_laid_out(tensor: typing.Any, strides: tuple[int, ...]) -> typing.Any:
    """The tensor with these strides; a copy if it has others, or is a lazy view. None stays."""
    if tensor is None:
        return None
    lazy = tensor.is_neg() or tensor.is_conj()
    if not lazy and (tensor.stride() == strides or _fw_same_strides(tensor, strides)):
        return tensor
    shape = tuple(tensor.shape)
    fresh = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    return fresh.copy_(tensor)


def _fw_empty(layout: typing.Sequence[typing.Any], device: torch.device) -> torch.Tensor:
    """A new tensor. A layout is dtype, shape, strides, and the device if it is not the kernels'."""
    dtype, shape, strides, *other = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device=other[0] if other else device)


def _fw_taken(
    values: list[typing.Any], layouts: typing.Sequence[typing.Any], device: torch.device
) -> list[typing.Any]:
    """What backward's kernels read, in the layouts that they expect.

    A layout is None for any, the strides of a saved value, or that of an output's gradient as in
    `_fw_empty`. A gradient that is None means zeros. `values` is emptied, so that a `del` in the
    driver frees memory at once.
    """
    taken: list[typing.Any] = []
    for value, layout in zip(values, layouts, strict=True):
        tangent = bool(layout) and isinstance(layout[0], torch.dtype)
        if tangent and value is None:
            taken.append(_fw_empty(layout, device).zero_())
        else:
            strides = layout[2] if tangent else layout
            taken.append(value if strides is None else _fw_laid_out(value, strides))
    values.clear()
    return taken


def _fw_here(
    constant: torch.Tensor, kept: dict[typing.Any, torch.Tensor], where: typing.Any
) -> torch.Tensor:
    """A constant of the graph on this device; it is copied there once."""
    if where not in kept:
        with torch.inference_mode(False):  # a tensor of inference mode could not be saved later
            kept[where] = constant.to(where)
    return kept[where]


def _fw_numbers(words: str) -> tuple[int, ...]:
    """The numbers of a text such as "0 3-5"."""
    found: list[int] = []
    for word in words.split():
        first, _, last = word.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


class _FwMode:
    """One program: its drivers, the calls that fit it, and how its values are connected.

    `forward` and `inference` return the outputs, then the new values of `mutations`; `forward`
    also returns values that backward needs beside the inputs. `saved` indexes inputs and results,
    in this order. If `as_given`, the graph's inputs are the call's arguments and `gather` need not
    be called. If `lone`, the module's result is the first output and `outputs` need not be called.
    A program that `records` hands an autograd graph from forward to backward, which operators of
    torch.library cannot do. `states` are the attributes that the model changes; `outputs` then also
    returns their new values. `forward_only` says why there is no backward; otherwise it is empty.
    `pinned` has classes and functions themselves, where they are known. `watched` has objects in
    other places: a dictionary or the path of a submodule, a name, and the object, or `_FwGone`.
    Of `owners` say: `inner`, that there are submodules; `tables`, that their tensors are checked;
    `contains`, that values contain others; `rare`, that there are hooks, lists or further tensors.
    """

    name: str
    training: bool
    autocast: torch.dtype | None = None
    device_type: str
    parameters: tuple[str, ...]
    structure: str
    plain: int
    owners: tuple[typing.Any, ...]
    symbols: tuple[tuple[int, int, int], ...] = ()
    main: int = 0
    n_tensors: int
    n_outputs: int
    n_inference: int
    n_results: int
    fixed: tuple[int, ...] = ()
    mutations: tuple[tuple[int, int], ...] = ()
    saved: tuple[int, ...]
    tangents: tuple[int | None, ...]
    reach: tuple[tuple[int, tuple[int, ...]], ...] = ()
    gather: _fw_drive
    misfit: _fw_drive
    outputs: _fw_drive
    layouts: _fw_drive
    inference: _fw_drive
    forward: _fw_drive | None = None
    backward: _fw_drive | None = None
    gradient_layouts: _fw_drive | None = None
    operators: tuple[_fw_drive, ...] = ()
    as_given: bool = False
    lone: bool = False
    records: bool = False
    states: typing.Any = None
    forward_only: str = ""
    default_dtype: torch.dtype = torch.float32
    pinned: tuple[typing.Any, ...] = ()
    watched: tuple[typing.Any, ...] = ()
    inner: bool = True
    rare: bool = True
    tables: bool = True
    contains: bool = True

    def __init__(self, **facts: typing.Any) -> None:
        # Not a dataclass: to resolve annotations that are text, it looks up the module in
        # sys.modules, and a loader of an emitted file may not have entered it there.
        vars(self).update(facts)
        # For grad mode off and on, the last few kinds of call that fitted: a test whether other
        # tensors are of the same kind, and whether the call wants gradients.
        self.fitted: list[tuple[tuple[_fw_drive, bool], ...]] = [(), ()]

    def sizes(self, tensors: _fw_tensors) -> tuple[int, ...]:
        return tuple([tensors[index].shape[dim] // part for index, dim, part in self.symbols])


_fw_programs = typing.Sequence[_FwMode]


def _fw_forward(
    modes: _fw_programs, module: typing.Any, args: _fw_given, kwargs: _fw_named
) -> tuple[str | None, typing.Any]:
    """None and the module's result, or the reason why no program fits this call, and None.

    A remembered kind of call is handled here: each further Python function would cost 0.1 µs.
    """
    compiling = _fw_compiling()
    if not compiling and _fw_profiler._is_profiler_enabled:
        for mode in modes:
            _fw_show(mode.inference)
    plain = not kwargs
    for each in args:  # not any(...): a generator takes 0.3 µs
        # A nested tensor must not be compared: it has no strides, and asking for them is fatal.
        if getattr(each, "is_nested", False) is True:  # a torch.fx.Proxy has any attribute
            plain = False
    unusual = compiling or not plain or _fw_forward_ad._current_level >= 0 or _fw_modes()
    if unusual or (_fw_function_modes() and _fw_sees_functions()):
        return _fw_guarded(modes, module, args, kwargs, plain)
    training, grad_mode, dtype = module.training, _fw_grad_mode(), torch.get_default_dtype()
    for mode in modes:
        if mode.training == training and mode.plain == len(args) and mode.default_dtype is dtype:
            tensors = args if mode.as_given else mode.gather(module, args)
            for alike, wanted in mode.fitted[grad_mode]:
                if alike(*tensors):
                    misfit = mode.states is not None and mode.states.misfit(module, tensors)
                    if misfit or not _fw_unaltered(module, mode):
                        break
                    if wanted or mode.mutations or mode.states is not None:
                        return None, _fw_run(mode, tensors, wanted, module)
                    results = mode.inference(*tensors)
                    return None, results[0] if mode.lone else mode.outputs(tensors, results)
    return _fw_guarded(modes, module, args, kwargs, plain)


def _fw_guarded(
    modes: _fw_programs, module: typing.Any, args: _fw_given, kwargs: _fw_named, plain: bool
) -> tuple[str | None, typing.Any]:
    """The same for a call of an unknown kind: all guards are checked."""
    reason: str | None = None
    for mode in modes:
        if mode.training == module.training:
            tensors, misfit = _fw_bind(mode, module, args, kwargs)
            if misfit is None and _fw_compiling():
                return None, _fw_traced(mode, tensors)
            if misfit is None:
                wanted = _fw_remember(mode, tensors, plain)
                return None, _fw_driven(_fw_run, mode, tensors, wanted, module)
            # What the program of another state says of a call tells less.
            if reason is None or not misfit.startswith("attribute "):
                reason = misfit
    if reason is None:
        reason = f"there is no program for {'training' if module.training else 'evaluation'}"
    return reason, None


def _fw_bind(
    mode: _FwMode, module: typing.Any, args: _fw_given, kwargs: _fw_named
) -> tuple[_fw_tensors, str | None]:
    """The graph's input tensors, and the reason why they do not fit, or None if they fit."""
    leaves: typing.Any = args
    if kwargs or len(args) != mode.plain:
        leaves = []
        structure = _fw_flatten(_fw_positional(mode.parameters, args, kwargs), leaves)
        if structure != mode.structure:
            return (), f"the arguments are {structure} instead of {mode.structure}"
        if _FW_UNKNOWN in structure:
            return (), f"the arguments are {structure}, whose content cannot be compared"
    tensors: _fw_tensors = mode.gather(module, leaves)
    wanted = mode.forward_only and _fw_grad_mode()
    if wanted and any(getattr(each, "requires_grad", False) for each in tensors):
        return tensors, mode.forward_only
    reason = mode.misfit(*tensors)
    if reason is None and mode.states is not None:
        reason = mode.states.misfit(module, tensors)
        if _fw_compiling():
            reason = "the model changes its attributes, which torch.compile handles itself"
    if reason is None and torch.get_default_dtype() is not mode.default_dtype:
        reason = f"the default dtype is not {mode.default_dtype}"
    if reason is None and _fw_compiling() and mode.records:
        reason = "the model has a recurrent layer, which torch.compile handles itself"
    if reason is None and _fw_compiling():
        reason = _fw_altered(module, mode)
    elif reason is None:
        reason = _fw_looked(module, mode)
    autocast = _fw_autocast(mode.device_type)
    if reason is None and autocast is not mode.autocast:
        reason = f"autocast is {autocast or 'off'} instead of {mode.autocast or 'off'}"
    if reason is None and mode.mutations and _fw_given_twice(mode, tensors):
        reason = "a tensor that the model changes in place is given twice"
    if reason is None and not _fw_compiling():
        reason = _fw_watcher(leaves)
    return tensors, reason


def _fw_given_twice(mode: _FwMode, tensors: _fw_tensors) -> bool:
    """Whether a tensor that is changed in place is also another input, which would change, too."""
    names = [id(tensor) for tensor in tensors]
    if len(set(names)) == len(names):
        return False
    return any(names.count(names[target]) > 1 for target, _ in mode.mutations)


def _fw_remember(mode: _FwMode, tensors: _fw_tensors, plain: bool) -> bool:
    """Whether gradients are wanted for these tensors, which fit. Remembers this kind of call.

    Only a `plain` call is remembered: one with positional arguments that are tensors.
    """
    grad_mode = torch.is_grad_enabled()
    wanted = grad_mode and any(tensor.requires_grad for tensor in tensors)
    # Dispatch keys show that autocast is on, but not its dtype, and only for its own device.
    once = len(set(map(id, tensors))) == len(tensors)
    if plain and once and mode.plain > 0 and mode.autocast is None and mode.n_tensors:
        alike = _fw_likeness(tensors)
        if alike and tensors[mode.main].device.type == mode.device_type:
            mode.fitted[grad_mode] = ((alike, wanted), *mode.fitted[grad_mode][: _FW_KINDS - 1])
    return wanted


def _fw_run(
    mode: _FwMode, tensors: _fw_tensors, wanted: bool, module: typing.Any = None
) -> typing.Any:
    """Run in eager mode: there is no dispatcher between the module and its kernels."""
    if mode.states is not None and module is not None:
        return mode.states.run(mode, module, tensors, wanted)
    if wanted and mode.backward is not None:
        return mode.outputs(tensors, _fw_apply(mode, *tensors))
    with torch.no_grad():  # the outputs may be views of tensors that require gradients
        results = mode.inference(*tensors, True) if mode.mutations else mode.inference(*tensors)
        if mode.mutations:
            _fw_write(mode, tensors, results)
    return mode.outputs(tensors, results)


def _fw_write(mode: _FwMode, tensors: _fw_tensors, results: _fw_tensors) -> None:
    """Copy new values into the buffers that the model changes; some may be there already."""
    for index, source in mode.mutations:
        target = tensors[index]
        if results[source] is not target:
            target.copy_(results[source])
        elif not target.is_inference():
            _fw_increment(target)  # the version, as a copy would


def _fw_save(ctx: typing.Any, mode: _FwMode, tensors: _fw_tensors, results: _fw_tensors) -> None:
    """Save what backward needs. Gradients of unused outputs stay None."""
    known = tensors + results
    ctx.save_for_backward(*[known[index] for index in mode.saved])
    ctx.set_materialize_grads(False)
    ctx.call = (mode, mode.sizes(tensors), tensors[mode.main].device)


def _fw_fixed(mode: _FwMode, need: typing.Sequence[bool]) -> list[int]:
    """Outputs without a gradient: by nature, or because none of their inputs needs one."""
    apart = [k for k, bindings in mode.reach if not any(need[index] for index in bindings)]
    return [*mode.fixed, *apart]


def _fw_first_only() -> None:
    """Refuse a backward whose gradients are to be differentiated, before it computes any.

    A node in the graph that raises an error later is not enough: it is on no path to the inputs
    of `torch.autograd.grad`, which then returns zeros or None.
    """
    if _fw_grad_mode():
        raise _FwSecondDerivative(_FW_ONCE)


class _FwFunction(torch.autograd.Function):
    """One node of the autograd graph for the whole model."""

    @staticmethod
    def forward(ctx: typing.Any, mode: _FwMode, *tensors: torch.Tensor) -> _fw_tensors:
        assert mode.forward is not None
        run = mode.forward
        results: _fw_tensors = run(*tensors, True) if mode.mutations else run(*tensors)
        _fw_save(ctx, mode, tensors, results)
        if mode.fixed or mode.reach:
            fixed = _fw_fixed(mode, ctx.needs_input_grad[1:])
            ctx.mark_non_differentiable(*[results[index] for index in fixed])
        if mode.mutations:
            _fw_write(mode, tensors, results)
        return results[: mode.n_outputs]

    @staticmethod
    def backward(ctx: typing.Any, *tangents: torch.Tensor | None) -> tuple[typing.Any, ...]:
        _fw_first_only()
        mode, sizes, device = ctx.call
        if _fw_profiler._is_profiler_enabled:
            _fw_show(mode.backward)
        if all(tangent is None for tangent in tangents):
            # Reached through a later call that does not depend on this one: nothing is needed, and
            # what was saved may be gone.
            return (None, *[None for _ in ctx.needs_input_grad[1:]])
        values = [None if index is None else tangents[index] for index in mode.tangents]
        values = [*ctx.saved_tensors, *values]
        ctx.maybe_clear_saved_tensors()  # so that a `del` in the driver frees memory at once
        return (None, *_fw_driven(mode.backward, values, sizes, device, ctx.needs_input_grad[1:]))


# Function.apply first looks for wrappers of torch.func, in 4 µs; `_fw_watcher` excludes them.
_fw_apply: _fw_drive = super(torch.autograd.Function, _FwFunction).apply


def _fw_traced(mode: _FwMode, tensors: _fw_tensors) -> typing.Any:
    """Run under torch.compile: by registered operators, which its graph can hold."""
    wanted = mode.backward is not None and torch.is_grad_enabled()
    wanted = wanted and any(tensor.requires_grad for tensor in tensors)
    results: _fw_tensors = ()  # if all that the module returns are views of its tensors
    if mode.n_inference:
        results = tuple(mode.operators[1 if wanted else 0](list(tensors)))
    if mode.mutations:
        with torch.no_grad():
            _fw_write(mode, tensors, results)
    return mode.outputs(tensors, results)
