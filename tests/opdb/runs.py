"""One call of a model, with gradients: everything that is compared."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.opdb.models import tensors_of

_WIDER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}


@dataclass(frozen=True)
class Run:
    """What one call returned and did. `gradients` is None if there was no backward; `failed` says
    where it ended, and with which error."""

    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    failed: str = ""
    drew: bool = False

    @property
    def values(self) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {
            f"output {at}": each for at, each in enumerate(self.outputs)
        }
        return found | {f"buffer {n}": b for n, b in self.buffers.items()} | (self.gradients or {})


def run(
    model: nn.Module, inputs: Sequence[Tensor], mode: str = "train", *, gradients: bool = True
) -> Run:
    """Call the model on copies of the inputs, then differentiate."""
    model.train(mode == "train")
    given = [fresh(each) for each in inputs]
    torch.manual_seed(7)
    state = _state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*bug in Fusewright")
        try:
            with torch.set_grad_enabled(gradients):
                outputs = tensors_of(model(*given))
        except Exception as error:
            return Run(failed=f"forward: {type(error).__name__}: {error}")
        drew = not all(map(torch.equal, state, _state()))
        held = {name: each.detach().clone() for name, each in model.named_buffers()}
        found, failed = _gradients(model, given, outputs) if gradients else (None, "")
    return Run([each.detach() for each in outputs], found, held, failed, drew)


def _gradients(
    model: nn.Module, given: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[dict[str, Tensor | None] | None, str]:
    leaves = {f"gradient of input {at}": x for at, x in enumerate(given) if x.requires_grad}
    leaves |= {f"gradient of {name}": each for name, each in model.named_parameters()}
    ends = [each for each in outputs if each.requires_grad]
    if not leaves or not ends:
        return dict.fromkeys(leaves), ""
    try:
        tangents = [_tangent(each, at) for at, each in enumerate(ends)]
        found = torch.autograd.grad(ends, [*leaves.values()], tangents, allow_unused=True)
    except Exception as error:
        return None, f"backward: {type(error).__name__}: {error}"
    return dict(zip(leaves, found, strict=True)), ""


def _tangent(output: Tensor, at: int) -> Tensor:
    generator = torch.Generator().manual_seed(at)
    made = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    # Few bits: the same numbers in every precision.
    made = ((made * 8).round() / 8).to(output.device, output.dtype)
    if output.layout is not torch.strided:
        return made.to_sparse(layout=output.layout)
    return torch.empty_like(output).copy_(made)  # in memory as the output is


def fresh(x: Tensor) -> Tensor:
    """A copy of the tensor that lies in memory as it does."""
    if x.layout is not torch.strided:
        return x.detach().clone().requires_grad_(x.requires_grad)
    storage = x.detach().untyped_storage().clone()
    made = torch.empty(0, dtype=x.dtype, device=x.device)
    made.set_(storage, x.storage_offset(), x.shape, x.stride())
    if x.is_conj():
        made = made.conj()
    return made.requires_grad_(x.requires_grad)


def _state() -> list[Tensor]:
    """Of PyTorch's generators."""
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpu]


def in_float64(model: nn.Module, inputs: Sequence[Tensor], mode: str) -> Run:
    """The same call in float64, or a run that failed."""
    try:
        wide = copy.deepcopy(model)
        for each in wide.modules():
            _widen(each)
        return run(wide, [_widened(each) for each in inputs], mode)
    except Exception as error:
        return Run(failed=f"float64: {type(error).__name__}: {error}")


def _widen(module: nn.Module) -> None:
    for held in (module._parameters, module._buffers):
        for name, each in held.items():
            if each is not None and each.dtype in _WIDER:
                with torch.no_grad():
                    held[name] = _as_kind(each.to(_WIDER[each.dtype]), each)


def _as_kind(value: Tensor, like: Tensor) -> Any:
    return nn.Parameter(value, like.requires_grad) if isinstance(like, nn.Parameter) else value


def _widened(x: Tensor) -> Tensor:
    if x.dtype not in _WIDER:
        return x
    return x.detach().to(_WIDER[x.dtype]).requires_grad_(x.requires_grad)
