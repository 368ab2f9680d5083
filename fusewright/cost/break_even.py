"""From which batch on the program that runs on tensor cores is the better one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusewright.cost import conv_tensor_core as window_cost
from fusewright.cost import convolution as convolution_cost
from fusewright.cost import matmul as product_cost
from fusewright.ir.convolution import WindowKernel
from fusewright.ir.graph import ONE
from fusewright.ir.matmul import ProductKernel


def least_size(
    kernels: Sequence[ProductKernel | WindowKernel],
    symbol: str,
    sizes: Mapping[str, int],
    sms: int,
    tf32: bool = False,
) -> int:
    """The smallest size of `symbol` from which on these kernels together are worth their while.

    At the example's own size they are, by choice.
    """
    low, high = 1, sizes[symbol]
    while low < high:
        middle = (low + high) // 2
        times = [_times(each, {**sizes, symbol: middle}, sms, tf32) for each in kernels]
        pays = sum(ours for ours, _ in times) <= sum(library for _, library in times)
        low, high = (low, middle) if pays else (middle + 1, high)
    return high


def _times(
    kernel: ProductKernel | WindowKernel, sizes: Mapping[str, int], sms: int, tf32: bool
) -> tuple[float, float]:
    """Our microseconds and the library's."""
    if isinstance(kernel, ProductKernel):
        of, dtype = kernel.extents(sizes), product_cost.multiplied_as(kernel.a.dtype, tf32)
        return product_cost.best_us(of, sms, dtype), product_cost.library_us(of, dtype)
    row_by_row = kernel.source.strides[-1] == ONE and kernel.prologue is None
    whole = kernel.geometry
    ours = convolution_cost.our_us(whole, kernel.walked, sizes, sms, row_by_row)
    assert ours is not None, f"rewriting asks for room first: {whole}"
    return ours, window_cost.library_us(whole, sizes)
