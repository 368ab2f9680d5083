"""Whether a call fits a program, and if not, the reason as text for a warning."""

import hashlib
import typing

import torch

from fusewright.runtime.library import _fw_compiled

# Begins the text of an argument that cannot be compared: its repr is an address, and the object at
# an address may have changed or been replaced.
_FW_UNKNOWN = "<any "
_FW_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_fw_function_modes: typing.Any = torch._C._len_torch_function_stack
_fw_function_mode: typing.Any = torch._C._get_function_stack_at


def _fw_attribute(owner: typing.Any, path: tuple[str, ...]) -> typing.Any:
    """An attribute by its path. In a tuple, list or dict, the path goes on with positions."""
    for name in path:
        if isinstance(owner, (tuple, list, dict)):
            items = [*owner.values()] if isinstance(owner, dict) else owner
            owner = items[int(name)] if int(name) < len(items) else None
        else:
            owner = getattr(owner, name, None)
    return owner


def _fw_positional(
    names: tuple[str, ...], args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]
) -> tuple[tuple[typing.Any, ...], dict[str, typing.Any]]:
    """Keyword arguments moved to the positions that the original forward gives them."""
    rest = dict(kwargs)
    for name in names[len(args) :]:
        if name not in rest:
            break
        args += (rest.pop(name),)
    return args, rest


def _fw_flatten(value: typing.Any, leaves: list[typing.Any]) -> str:
    """Append the tensors in `value` to `leaves`. Returns a text of everything else."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return "tensor"
    if isinstance(value, (tuple, list)):
        inside = ", ".join([_fw_flatten(item, leaves) for item in value])
    elif isinstance(value, dict):
        inside = ", ".join([f"{key!r}: {_fw_flatten(item, leaves)}" for key, item in value.items()])
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return _fw_array_text(value)
    else:
        text = repr(value)
        return f"{_FW_UNKNOWN}{type(value).__name__}>" if " at 0x" in text else text
    return f"{type(value).__name__}({inside})"


def _fw_array_text(array: typing.Any) -> str:
    """A NumPy array by a digest of all elements: repr leaves out the middle of a long one."""
    held = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
    digest = hashlib.sha256(held).hexdigest()[:32]
    return f"{type(array).__name__}({array.dtype}, {array.shape}, {digest})"


def _fw_same_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether the layout is the same; strides of dimensions of size one do not matter."""
    if tensor.stride() == strides or tensor.numel() == 0:
        return True
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size == 1 or mine == wanted for size, mine, wanted in pairs)


def _fw_rank(value: typing.Any) -> int:
    """The number of dimensions of a tensor; -1 for nested tensors and other objects."""
    return value.dim() if isinstance(value, torch.Tensor) and not value.is_nested else -1


def _fw_misfits(
    tensors: typing.Sequence[typing.Any],
    rows: typing.Sequence[typing.Any],
    device: torch.device,
) -> str | None:
    """Why the kernels were not written for such tensors, or None if they were.

    A row has a label, dtype, shape, strides (None: contiguous), whether the tensor must need no
    gradient, and a type of device, if it is another one.
    """
    for tensor, row in zip(tensors, rows, strict=True):
        where = torch.device(row[5]) if len(row) > 5 else device
        reason = _fw_misfit(tensor, row[0], row[1], row[2], row[3], row[4], where)
        if reason is not None:
            return reason
    return None


def _fw_misfit(
    tensor: typing.Any,
    label: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    frozen: bool,
    device: torch.device,
) -> str | None:
    """The same for one tensor."""
    if type(tensor) not in _FW_PLAIN:
        return f"{label} is a {type(tensor).__name__} instead of a tensor"
    if tensor.layout is not torch.strided:
        return f"{label} is {tensor.layout} instead of torch.strided"
    if tensor.dtype is not dtype:
        return f"{label} is {tensor.dtype} instead of {dtype}"
    if tensor.device != device:
        return f"{label} is on {tensor.device} instead of {device}"
    if tensor.shape != shape:
        return f"{label} has shape {tuple(tensor.shape)} instead of {shape}"
    if strides is None:
        if not tensor.is_contiguous():
            return f"{label} has strides {tensor.stride()} instead of contiguous ones"
    elif tensor.stride() != strides and not _fw_same_strides(tensor, strides):
        return f"{label} has strides {tensor.stride()} instead of {strides}"
    if frozen and tensor.requires_grad and torch.is_grad_enabled():
        return f"{label} requires a gradient, and there is no program that computes it"
    return None


def _fw_autocast(device_type: str) -> torch.dtype | None:
    """The dtype that autocast converts to on this kind of device, or None if it is off."""
    on = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


def _fw_driven(run: typing.Callable[..., typing.Any], *given: typing.Any) -> typing.Any:
    """Run a program with autocast off, because its steps have autocast's conversions already.

    Autocast would convert once more for PyTorch's calls, such as a backward's matmuls where a
    user calls `backward` under autocast, and our kernels would read 16 bits as 32.
    """
    if not torch._C._is_any_autocast_enabled():
        return run(*given)
    with torch._C._DisableAutocast():
        return run(*given)


def _fw_sees_functions() -> bool:
    """Whether a mode sees each function of PyTorch; the one of a default device does not count."""
    modes = [_fw_function_mode(at) for at in range(_fw_function_modes())]
    return any(type(mode).__name__ != "DeviceContext" for mode in modes)


def _fw_watcher(leaves: typing.Sequence[torch.Tensor] = ()) -> str | None:
    """Why eager kernels must not run, or None: lazy views, or a mode that sees each operator."""
    for leaf in leaves:
        if leaf.is_neg() or leaf.is_conj():
            return "an argument is a lazily negated or conjugated view"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode is active"
    if _fw_sees_functions():
        return "a mode that sees each function of PyTorch is active"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace is active"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    return None


# torch.compile's comparison of tensors with those of an earlier call, all at once: 0.4 µs for three
# tensors, while separate comparisons take 5 µs. It compares types, dispatch keys, dtypes, devices,
# sizes, strides and requires_grad, and notices a tensor that is given twice. Dispatch keys show
# lazy views, autocast, torch.func, dispatch modes and tracing.
_fw_tensor_guards: typing.Any = getattr(_fw_compiled, "TensorGuards", None)


def _fw_likeness(tensors: typing.Sequence[torch.Tensor]) -> typing.Callable[..., bool] | None:
    """A test whether all guards give the same answers for other tensors; None if unavailable.

    It keeps no tensor alive. It does not notice forward-mode derivatives. It must not be called
    with nested tensors: it reads strides, which they do not have.
    """
    if _fw_tensor_guards is None:
        return None
    made = _fw_tensor_guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: typing.Callable[..., bool] = made.check
    return check
