"""Registers the drivers as torch.library operators, so that torch.compile graphs can hold them."""

import typing

import torch

from fusewright.runtime.call import (
    _FW_ONCE,
    _fw_compiling,
    _fw_drive,
    _fw_empty,
    _fw_first_only,
    _fw_fixed,
    _fw_laid_out,
    _fw_save,
    _FwMode,
    _FwSecondDerivative,
)
from fusewright.runtime.guard import _fw_driven
from fusewright.runtime.library import _fw_profiler, _fw_show

_fw_layout = tuple[typing.Any, ...]  # as in `_fw_empty`


def _fw_behind(
    base: torch.Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """A view that begins `offset` elements behind the base.

    A graph of torch.compile cannot ask where the base begins. So there the view is one of a slice
    of all elements up to the view's last.
    """
    if not _fw_compiling() or offset < 0:
        return base.as_strided(shape, strides, base.storage_offset() + offset)
    if 0 in shape:
        return base.as_strided(shape, strides)
    end = offset + 1
    for size, stride in zip(shape, strides, strict=True):
        end += (size - 1) * stride
    return base.as_strided((end,), (1,))[offset:].as_strided(shape, strides)


def _fw_register(mode: _FwMode) -> _FwMode:
    """Register the mode's operators, once per name and process, and store them in the mode."""
    if not (mode.n_inference and mode.n_tensors) or mode.records or mode.states is not None:
        return mode
    names = [f"{mode.name}_inference", f"{mode.name}_forward", f"{mode.name}_backward"]
    names = names if mode.backward is not None else names[:1]
    if not hasattr(torch.ops.fusewright, names[0]):
        _fw_define_forward(mode, names[0], mode.inference, mode.n_inference)
        if mode.forward is not None and mode.backward is not None:
            _fw_define_forward(mode, names[1], mode.forward, mode.n_results)
            _fw_define_backward(mode, names[2])
            _fw_define_autograd(mode, names[1], names[2])
    mode.operators = tuple([getattr(torch.ops.fusewright, name).default for name in names])
    return mode


def _fw_define(name: str, schema: str, real: _fw_drive, fake: _fw_drive) -> None:
    torch.library.define(f"fusewright::{name}", schema)
    torch.library.impl(f"fusewright::{name}", "default", real)
    # It looks for the source of its caller in all modules, 14 ms. Its own source it finds at once.
    torch.library.register_fake(f"fusewright::{name}", fake, _stacklevel=0)


def _fw_define_forward(mode: _FwMode, name: str, driver: _fw_drive, results: int) -> None:
    # Lists, because a schema has at most 64 arguments and a model may have more parameters.
    def real(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        layouts = mode.layouts(*tensors)[:results]
        if _fw_profiler._is_profiler_enabled:
            _fw_show(driver)
        return _fw_own(_fw_driven(driver, *tensors), layouts, tensors)

    def fake(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        device = tensors[mode.main].device
        return [_fw_empty(each, device) for each in mode.layouts(*tensors)[:results]]

    _fw_define(name, "(Tensor[] tensors) -> Tensor[]", real, fake)


def _fw_where(mode: _FwMode, tensors: typing.Iterable[torch.Tensor]) -> torch.device:
    """The device of the kernels: that of the first tensor which is not elsewhere."""
    devices = [each.device for each in tensors]
    return next((each for each in devices if each.type == mode.device_type), devices[0])


def _fw_own(
    results: typing.Sequence[torch.Tensor],
    layouts: typing.Sequence[_fw_layout],
    inputs: typing.Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The results as the fake kernel describes them: with these layouts, no memory shared."""
    seen = {each.untyped_storage().data_ptr() for each in inputs}
    own = []
    for result, layout in zip(results, layouts, strict=True):
        if result.untyped_storage().data_ptr() in seen:
            result = _fw_empty(layout, result.device).copy_(result)
        own.append(_fw_laid_out(result, layout[2]))
        seen.add(own[-1].untyped_storage().data_ptr())
    return own


def _fw_define_backward(mode: _FwMode, name: str) -> None:
    layouts_of = mode.gradient_layouts

    def real(values: list[typing.Any], sizes: list[int], need: list[bool]) -> list[torch.Tensor]:
        given = [each for each in values if each is not None]
        assert mode.backward is not None and layouts_of is not None
        if _fw_profiler._is_profiler_enabled:
            _fw_show(mode.backward)
        where = _fw_where(mode, given)
        gradients = _fw_driven(mode.backward, list(values), sizes, where, need)
        pairs = zip(gradients, layouts_of(*sizes), strict=True)
        wanted = [(each, layout) for each, layout in pairs if each is not None]
        return _fw_own([each for each, _ in wanted], [layout for _, layout in wanted], given)

    def fake(values: list[typing.Any], sizes: list[int], need: list[bool]) -> list[torch.Tensor]:
        device = _fw_where(mode, [each for each in values if each is not None])
        assert layouts_of is not None
        pairs = zip(layouts_of(*sizes), need, strict=True)
        return [_fw_empty(layout, device) for layout, wanted in pairs if layout and wanted]

    _fw_define(name, "(Tensor?[] values, SymInt[] sizes, bool[] need) -> Tensor[]", real, fake)


def _fw_define_autograd(mode: _FwMode, forward: str, backward: str) -> None:
    def keep(ctx: typing.Any, inputs: tuple[typing.Any, ...], output: typing.Any) -> None:
        results = tuple(output)
        _fw_save(ctx, mode, tuple(inputs[0]), results)
        # After the outputs come new buffer values and values for backward, without gradients.
        fixed = results[mode.n_outputs :]
        if mode.fixed or mode.reach:
            apart = _fw_fixed(mode, ctx.needs_input_grad)
            fixed += tuple([results[index] for index in apart])
        ctx.mark_non_differentiable(*fixed)

    def differentiate(ctx: typing.Any, tangents: list[torch.Tensor | None]) -> typing.Any:
        _fw_first_only()
        values = [None if index is None else tangents[index] for index in mode.tangents]
        need = list(ctx.needs_input_grad[0])
        operator = getattr(torch.ops.fusewright, backward).default
        made = iter(operator([*ctx.saved_tensors, *values], list(ctx.call[1]), need))
        assert mode.gradient_layouts is not None
        pairs = zip(mode.gradient_layouts(*ctx.call[1]), need, strict=True)
        return [next(made) if layout and wanted else None for layout, wanted in pairs]

    def refuse(ctx: typing.Any, *tangents: typing.Any) -> typing.NoReturn:
        raise _FwSecondDerivative(_FW_ONCE)

    torch.library.register_autograd(f"fusewright::{forward}", differentiate, setup_context=keep)
    torch.library.register_autograd(f"fusewright::{backward}", refuse)
