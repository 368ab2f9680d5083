"""A copy of a model and of its arguments, for tracing: nobody else sees what tracing changes.

Tracing puts fakes in the place of parameters, switches the mode, and may stop halfway. Another
thread may run the model meanwhile, and a forward may write into its arguments.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fusewright import debug

_PLAIN = (torch.Tensor, nn.Parameter)
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def private(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Call:
    """Copies for a trace. Parameters and buffers are new tensors over the same memory; all other
    tensors are shared.

    A function of the model that holds a module or a parameter would still use the original: then
    nothing is copied. Of objects that cannot be copied, only the modules are.
    """
    call = (model, tuple(args), dict(kwargs or {}))
    if _is_held(model):
        return call
    held = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(each): _alias(each) for each in held}
    try:
        with _SharedTensors():
            found: Call = copy.deepcopy(call, dict(memo))
        return found
    except Exception as error:  # of the user's own classes
        debug.log(1, "only modules are copied for the trace: %s", error)
        return _copied_modules(model, memo), *call[1:]


def real_copy(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """Copies for a real call, all tensors included. None if the copy would still use the original:
    by a function, or by a module that deepcopy does not copy. Raises what the user's own classes
    raise."""
    if _is_held(model):
        return None
    with _CopiedTensors():
        found: Call = copy.deepcopy((model, tuple(args), dict(kwargs)))
    kept = _identities(model) & _identities(found[0])
    return None if kept else found


def _identities(model: nn.Module) -> set[int]:
    """Of its modules and tensors."""
    return {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers())}


class _CopiedTensors(TorchFunctionMode):
    """While it is active, in this thread, a deep copy of any tensor is a leaf."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") != "__deepcopy__" or type(args[0]) not in _PLAIN:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            made = _cloned(tensor.detach())
            is_parameter = type(tensor) is nn.Parameter
            made = nn.Parameter(made, False) if is_parameter else made
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, of the stretch of memory that the tensor spans."""
    if tensor.layout is not torch.strided or tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in pairs)
    memory = tensor.as_strided((length,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


class _SharedTensors(TorchFunctionMode):
    """While it is active, in this thread, a deep copy of a tensor is the tensor itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__deepcopy__":
            return args[0]
        return func(*args, **(kwargs or {}))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor over the same memory; the same one if its class is not PyTorch's own."""
    if type(tensor) is nn.Parameter:
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    if type(tensor) is torch.Tensor and tensor.is_leaf:
        return tensor.detach().requires_grad_(tensor.requires_grad)
    return tensor


def _is_held(model: nn.Module) -> bool:
    """Whether a function among the attributes or hooks holds a module or a parameter."""
    waiting = [value for module in model.modules() for value in _functions(vars(module))]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        found = [*_contents(function), *(function.__defaults__ or ())]
        if any(isinstance(each, nn.Module | nn.Parameter) for each in found):
            return True
        waiting += [each for each in found if isinstance(each, types.FunctionType)]
    return False


def _functions(attributes: Mapping[str, Any]) -> Iterator[types.FunctionType]:
    for value in attributes.values():
        inside = value.values() if isinstance(value, Mapping) else (value,)
        yield from (each for each in inside if isinstance(each, types.FunctionType))


def _contents(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty until the function that encloses it assigns it
            continue


def _copied_modules(model: nn.Module, tensors: Mapping[int, Any]) -> nn.Module:
    """The tree of modules with new tables. All other attributes are shared."""
    copies = {id(each): object.__new__(type(each)) for each in model.modules()}
    known = {**copies, **tensors}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, dict):
                value = type(value)((key, known.get(id(x), x)) for key, x in value.items())
            copies[id(module)].__dict__[name] = known.get(id(value), value)
    return copies[id(model)]
