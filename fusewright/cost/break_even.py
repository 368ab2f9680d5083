"""The batch from which the program on tensor cores is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusewright.ir.graph import Sizes


def least_size(
    costs: Sequence[Callable[[Sizes], tuple[float, float]]], symbol: str, sizes: Sizes
) -> int:
    """The smallest `symbol` from which these kernels together take no longer than PyTorch's.

    `costs` gives our microseconds and PyTorch's. At the example's size ours are chosen already.
    """
    low, high = 1, sizes[symbol]
    while low < high:
        middle = (low + high) // 2
        times = [cost({**sizes, symbol: middle}) for cost in costs]
        pays = sum(ours for ours, _ in times) <= sum(theirs for _, theirs in times)
        low, high = (low, middle) if pays else (middle + 1, high)
    return high
