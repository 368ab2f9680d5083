"""The Python state of a model that a capture puts into kernels, and that guards compare."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import torch
from torch import nn

from fusewright.capture import in_mode
from fusewright.emit.bundle import Constant, Owner
from fusewright.runtime import altered, call, constants

Modes = tuple[call._FwMode, ...]
_INHERITED = frozenset(nn.Module().__dict__)


def owners_of(model: nn.Module, mode: str, changed: Sequence[str] = ()) -> tuple[Owner, ...]:
    """The model and each submodule in `mode`, with the values that a capture puts into kernels.

    The attributes `changed`, which calls of the model change, are none of them.
    """
    places = [path.rpartition(".") for path in changed]
    left_out = {(id(model.get_submodule(path)), name) for path, _, name in places}
    with in_mode(model, mode):
        return tuple(_owners(model, left_out))


def _owners(model: nn.Module, changed: Container[tuple[int, str]]) -> Iterator[Owner]:
    first: dict[int, tuple[str, ...]] = {}
    # A module with two paths is checked at both: one of them may get another module.
    for name, module in model.named_modules(remove_duplicate=False):
        path = tuple(name.split(".")) if name else ()
        tensors = [
            (table, key, tensor is not None and _first(first, tensor, (*path, key)))
            for table in ("_parameters", "_buffers")
            for key, tensor in vars(module)[table].items()
        ]
        children = [key for key, child in module._modules.items() if child is not None]
        hooks = [text for text in altered._fw_hooks(module) if text is not None] if path else []
        # What a hook sets, such as a pruned weight: it fails if a parameter has this name.
        state = vars(module).items() if hooks else ()
        tensors += [("_parameters", n, False) for n, x in state if isinstance(x, torch.Tensor)]
        kind = altered._fw_kind(module) if path else ""
        constants = _constants(module, bool(path))
        values = tuple((k, v) for k, v in constants if (id(module), k) not in changed)
        yield Owner(path, kind, values, tuple(children), tuple(tensors), tuple(hooks))


def _first(
    known: dict[int, tuple[str, ...]], tensor: torch.Tensor, path: tuple[str, ...]
) -> bool | tuple[str, ...]:
    """The path where the same tensor came first. A graph has it once, so it must stay the same."""
    first = known.setdefault(id(tensor), path)
    return True if first == path else first


def _constants(module: nn.Module, inside: bool) -> Iterator[tuple[str, Constant]]:
    if inside:
        yield "training", module.training
    pytorchs = altered._fw_is_pytorchs(type(module))
    for name, value in vars(module).items():
        if name in _INHERITED or name.startswith("_fw_"):
            continue
        # The lists of PyTorch's layers follow from their other attributes, but for ParameterDict's.
        if pytorchs and isinstance(value, list | dict | set) and name != "_keys":
            continue
        known = constants._fw_constant(value)
        if known is not constants._FwGone:
            yield name, known


def pin(modes: Modes, model: nn.Module) -> Modes:
    """The programs, with the model's classes and functions themselves.

    Their records have only names, and two classes of a notebook, or two lambdas, can share a name.
    """
    found: list[tuple[tuple[str, ...], str, tuple[object, ...]]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        path = tuple(name.split(".")) if name else ()
        if path:
            found.append((path, "", (type(module),)))
        for key, value in vars(module).items():
            if key not in _INHERITED and (functions := constants._fw_functions(value)):
                found.append((path, key, functions))
    for mode in modes:
        mode.pinned = tuple(found)
    return modes
