"""Python numbers as the floating dtypes hold them."""

from __future__ import annotations

import math
import struct


def rounded(value: float, dtype: str) -> float:
    """The nearest number of a floating dtype."""
    if dtype == "float64" or not math.isfinite(value):
        return value
    kind = "<e" if dtype == "float16" else "<f"
    try:
        single = float(struct.unpack(kind, struct.pack(kind, value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
    return _rounded_bfloat16(single) if dtype == "bfloat16" else single


def _rounded_bfloat16(value: float) -> float:
    raw = int(struct.unpack("<I", struct.pack("<f", value))[0])
    raw = (raw + 0x7FFF + ((raw >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", raw & 0xFFFFFFFF))[0])
