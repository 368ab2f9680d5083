"""Optimizes submodules of a model in place, from one call of the whole model.

Equal parts, such as the layers of a transformer, are captured and compiled once. Their guards are
checked at each call, so a part that differs after all gets kernels of its own.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from fusewright import debug
from fusewright.capture.generators import watched_generators
from fusewright.capture.hooks import unhooked
from fusewright.capture.private import real_copy
from fusewright.capture.real_call import real_call
from fusewright.compile.call_kinds import kind_of_call
from fusewright.compile.engine import ENGINE, engine_of
from fusewright.compile.original import original_class
from fusewright.compile.owners import owners_of
from fusewright.compile.pipeline import MODES
from fusewright.compile.settings import example_arguments, refuse_torchscript
from fusewright.compile.solution import optimize
from fusewright.errors import ProblemError

Parts = str | type[nn.Module]
_Call = tuple[tuple[Any, ...], dict[str, Any]]


def optimize_parts(
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    parts: Parts | Sequence[Parts],
    modes: Sequence[str] = MODES,
    tune: bool = False,
    check: bool = True,
    mode: str = "default",
) -> nn.Module:
    """Let submodules of `model` run fused kernels, in place, and return the model.

    `parts` are classes of submodules, or their names, in which * stands for any text: Block,
    "encoder", "layers.*". A part inside another part belongs to that one. The inputs of each part
    are those of its first call in one call of the whole model, which runs on copies. Equal parts
    are compiled once and share their kernels. A part that this call does not reach stays as it is.
    """
    args = example_arguments(example_inputs, example_kwargs)
    chosen = _chosen(model, parts if isinstance(parts, tuple | list) else (parts,))
    calls = _calls(model, args, dict(example_kwargs or {}), list(chosen))
    how: dict[str, Any] = {"modes": modes, "tune": tune, "check": check, "mode": mode}
    made: dict[int, tuple[nn.Module, nn.Module]] = {}
    known: dict[str, nn.Module] = {}
    for path, part in chosen.items():
        if path not in calls:
            debug.log(1, "%s is not called in the example and stays as it is", path)
        elif id(part) not in made:
            kind = _kind(part, *calls[path])
            fast = known.get(kind)
            if fast is None:
                fast = optimize(part, *calls[path], **how)
                known[kind] = fast
            made[id(part)] = part, fast
    for part, fast in made.values():  # all or none, if one cannot be optimized
        _install(part, fast)
    return model


def _install(part: nn.Module, fast: nn.Module) -> None:
    """Let the part run the programs of an optimized module. Whoever holds the part keeps it."""
    engine = engine_of(fast)
    assert engine is not None
    vars(part).pop("_fw_seen", None)
    vars(part)[ENGINE] = copy.deepcopy(engine)
    part.__class__ = type(fast)


def _chosen(model: nn.Module, parts: Sequence[Parts]) -> dict[str, nn.Module]:
    """The outermost submodules that are asked for, by path."""
    found: dict[str, nn.Module] = {}
    met: set[Parts] = set()
    for path, each in model.named_modules(remove_duplicate=False):
        wanted = [part for part in parts if path and _is_meant(part, path, each)]
        met.update(wanted)
        if wanted and not any(path.startswith(f"{outer}.") for outer in found):
            refuse_torchscript(each)
            found[path] = each
    missing = [str(part) for part in parts if part not in met]
    if missing or not parts:
        names = ", ".join(missing) or "nothing"
        how = "parts are classes of submodules, or names as named_modules() gives them"
        raise ProblemError(f"no submodule of {type(model).__name__} is {names}; {how}")
    return found


def _is_meant(part: Parts, path: str, each: nn.Module) -> bool:
    if isinstance(part, str):
        return fnmatch.fnmatchcase(path, part)
    return isinstance(part, type) and isinstance(each, part)


def _calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], paths: Sequence[str]
) -> dict[str, _Call]:
    """The arguments of the first call of each submodule, in a call on copies."""
    copies = real_copy(model, args, kwargs)
    if copies is None:
        how = "optimize its parts one by one: model.part = fusewright.optimize(model.part, inputs)"
        raise ProblemError(f"a copy of {type(model).__name__} would still use the model; {how}")
    twin, args, kwargs = copies
    for each in twin.modules():
        each.__class__ = original_class(each)  # kernels would say that they are watched
    found: dict[str, _Call] = {}

    def noting(path: str) -> Any:
        def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if path not in found:
                found[path] = pytree.tree_map_only(torch.Tensor, _taken, (given, named))

        return note

    with real_call(), unhooked(twin), watched_generators(), torch.no_grad():
        for path in paths:
            twin.get_submodule(path).register_forward_pre_hook(noting(path), with_kwargs=True)
        twin(*args, **kwargs)
    return found


def _taken(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: the model may change the tensor in place later."""
    return tensor.detach().clone(memory_format=torch.preserve_format)


def _kind(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Parts of one kind have the same class, structure, constants, shapes and inputs."""
    owners = owners_of(part, "train" if part.training else "eval")
    return f"{id(type(part))}{kind_of_call(part, args, kwargs, ())}{owners}"
