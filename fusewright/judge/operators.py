"""Which of PyTorch's operators a call runs: a file with kernels of its own runs fewer of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping

import torch

# They compute nothing: memory, views, bookkeeping.
_FREE = frozenset(
    "empty empty_like empty_strided new_empty resize_ view reshape _reshape_alias _unsafe_view t "
    "transpose permute as_strided expand squeeze unsqueeze slice select narrow alias detach "
    "detach_ contiguous clone copy_ to _to_copy resolve_conj resolve_neg is_same_size unbind "
    "split chunk lift_fresh item _local_scalar_dense zeros zero_ fill_".split()
)


def operators_of(call: Callable[[], object]) -> dict[str, int]:
    """How often each operator runs in a call, on any thread that it starts."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
    with torch.autograd.profiler.profile() as profile:
        call()
    names = (each.name for each in profile.function_events or ())
    return dict(Counter(each.removeprefix("aten::") for each in names if each.startswith("aten::")))


def replaces_nothing(mine: Mapping[str, int], eager: Mapping[str, int]) -> bool:
    """Whether every operator of the model runs at least as often as in the model itself."""
    counted = {name: count for name, count in eager.items() if name not in _FREE}
    return bool(counted) and all(mine.get(name, 0) >= count for name, count in counted.items())
