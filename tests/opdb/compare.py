"""Whether our run did what eager mode's did: dtypes, shapes, strides, which gradients, values."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.opdb.runs import Run

FACTOR = 4.0  # times eager's own error
ULPS = 16.0  # of the largest number, or of each one where numbers are compared alone
ULPS_UNKNOWN = 256.0  # if there is no float64 run


def differences(ours: Run, eager: Run, truth: Run, by_element: bool = False) -> list[str]:
    """What differs, in words. Empty if nothing does."""
    if ours.failed or eager.failed:
        stages = [each.failed.split(":")[0] for each in (ours, eager)]
        if stages[0] == stages[1]:
            return []
        return [f"ours ends with {ours.failed or 'no error'}, eager with {eager.failed or 'none'}"]
    if ours.values.keys() != eager.values.keys():
        return [f"only one of both has {sorted(ours.values.keys() ^ eager.values.keys())}"]
    known = {} if eager.drew else truth.values
    found = []
    for name, mine in ours.values.items():
        words = _compared(name, mine, eager.values[name], known.get(name), by_element)
        found += [f"{name}: {words}"] if words else []
    return found


def _compared(
    name: str, mine: Tensor | None, eager: Tensor | None, truth: Tensor | None, by_element: bool
) -> str:
    if mine is None or eager is None:
        return "" if mine is eager else f"{_kind(mine)} instead of {_kind(eager)}"
    if (mine.dtype, mine.shape, mine.layout) != (eager.dtype, eager.shape, eager.layout):
        return f"{_kind(mine)} instead of {_kind(eager)}"
    if mine.layout is not torch.strided:
        mine, eager = mine.to_dense(), eager.to_dense()
        truth = None if truth is None else truth.to_dense()
    elif not _is_laid_out_alike(mine, eager):
        return f"strides {mine.stride()} instead of {eager.stride()} of {list(eager.shape)}"
    if mine.is_complex():
        mine, eager = (
            torch.view_as_real(mine.resolve_conj()),
            torch.view_as_real(eager.resolve_conj()),
        )
        truth = torch.view_as_real(truth.resolve_conj()) if _is_complex(truth) else None
    if not mine.is_floating_point():
        apart = int((mine != eager).sum())
        return f"{apart} of {mine.numel()} differ" if apart else ""
    if truth is not None and (truth.shape != mine.shape or truth.dtype != torch.float64):
        truth = None
    truth = None if mine.dtype == torch.float64 else truth
    return _values(mine, eager, truth, by_element)


def _is_complex(x: Tensor | None) -> bool:
    return x is not None and x.is_complex()


def _kind(x: Tensor | None) -> str:
    return "None" if x is None else f"{str(x.dtype)[6:]}{list(x.shape)}"


def _is_laid_out_alike(mine: Tensor, eager: Tensor) -> bool:
    """Strides of dimensions of size one do not matter. A view may come back as a copy."""
    if not eager.numel():
        return True
    matter = [at for at, size in enumerate(eager.shape) if size != 1]
    copied = torch.empty_like(eager).stride()
    return any(
        all(mine.stride(at) == each[at] for at in matter) for each in (eager.stride(), copied)
    )


def _values(mine: Tensor, eager: Tensor, truth: Tensor | None, by_element: bool) -> str:
    odd = _misplaced(mine, eager, truth, by_element)
    if odd is not None:
        return odd
    eps = torch.finfo(mine.dtype).eps
    least = torch.finfo(mine.dtype).smallest_normal
    fine = torch.isfinite(eager) & torch.isfinite(mine)
    fine = fine if truth is None else fine & torch.isfinite(truth)
    mine, eager = mine[fine].double(), eager[fine].double()
    exact = eager if truth is None else truth[fine]
    error, own = (mine - exact).abs(), (eager - exact).abs()
    ulps = (ULPS if truth is not None else ULPS_UNKNOWN) * eps
    if by_element:
        allowed = FACTOR * own + ulps * exact.abs() + least
        bad = error > allowed
    else:
        scale = exact.abs().max() if exact.numel() else exact.new_zeros(())
        allowed = (FACTOR * own.max() + ulps * scale if own.numel() else scale) + least
        bad = error > allowed
    if not bool(bad.any()):
        return ""
    at = int((error - allowed).argmax())
    count = f"{int(bad.sum())} of {bad.numel()} are off"
    return f"{count}: {mine[at]:.9g}, eager {eager[at]:.9g}, float64 {exact[at]:.9g}"


def _misplaced(mine: Tensor, eager: Tensor, truth: Tensor | None, signs: bool) -> str | None:
    """Elements that are NaN, infinite or, with `signs`, of the other sign of zero, where eager's
    are not. Those that are so in float64, too, are right: eager's vector code rounds off more."""
    wrong = _apart(mine, eager)
    if truth is not None:
        exact = truth.to(mine.dtype)
        near = (mine - exact).abs() <= ULPS * torch.finfo(mine.dtype).eps * exact.abs()
        wrong &= _apart(mine, exact) | (torch.isfinite(exact) & ~near)
    if signs:
        wrong |= (mine == 0) & (eager == 0) & (torch.signbit(mine) != torch.signbit(eager))
    if not bool(wrong.any()):
        return None
    at = int(wrong.reshape(-1).int().argmax())
    one, other = mine.reshape(-1)[at].item(), eager.reshape(-1)[at].item()
    return f"{int(wrong.sum())} of {mine.numel()} are misplaced: {one:.9g}, eager {other:.9g}"


def _apart(one: Tensor, other: Tensor) -> Tensor:
    apart = torch.isnan(one) != torch.isnan(other)
    apart |= torch.isinf(one) != torch.isinf(other)
    return apart | (torch.isinf(one) & torch.isinf(other) & (one != other))
