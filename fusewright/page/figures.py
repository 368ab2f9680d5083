"""Numbers as text for the reader: times, sizes, rates, ratios and errors."""

from __future__ import annotations

import math

from fusewright.bench.record import PASSES

NONE = "–"
_PASS_WORDS = {"forward": "forward", "train": "training"}


def in_words(pass_name: str) -> str:
    """The name of a pass in a sentence."""
    return _PASS_WORDS.get(pass_name, pass_name)


def title_of(pass_name: str) -> str:
    titles = dict(zip(PASSES, ("Forward (no gradients)", "Training step"), strict=True))
    return titles.get(pass_name, pass_name)


def time_text(us: float | None) -> str:
    """A time with three digits, in the unit that fits: 12.3 µs, 4.56 ms, 7.89 s."""
    if us is None or not math.isfinite(us):
        return NONE
    for unit in ("µs", "ms"):
        if abs(us) < 1000:
            return f"{_three(us)} {unit}"
        us /= 1000
    return f"{_three(us)} s"


def _three(value: float) -> str:
    """Three digits. Trailing zeros stay: they show how exact the figure is."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:.0f}"


def seconds_text(seconds: float | None) -> str:
    return NONE if seconds is None else time_text(seconds * 1e6)


def bytes_text(count: float | None) -> str:
    return NONE if count is None else _scaled(count, "B")


def rate_text(per_second: float | None, unit: str) -> str:
    return NONE if per_second is None else _scaled(per_second, f"{unit}/s")


def count_text(count: float | None) -> str:
    return NONE if count is None else _scaled(count, "").strip()


def ratio_text(ratio: float | None) -> str:
    if ratio is None or not math.isfinite(ratio):
        return NONE
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.3g}×"


def share_text(share: float | None) -> str:
    return NONE if share is None or not math.isfinite(share) else f"{share * 100:.3g} %"


def error_text(error: float | None) -> str:
    if error is None:
        return NONE
    return f"{error:.1e}" if math.isfinite(error) else "not finite"


def shortened(name: str, most: int) -> str:
    """A long name without its middle: names differ at the start or at the end."""
    if len(name) <= most:
        return name
    kept = most - 1
    return f"{name[: kept - kept // 3]}…{name[len(name) - kept // 3 :]}"


def _scaled(value: float, unit: str) -> str:
    """The value with a decimal prefix, as is usual for bandwidth and operation counts."""
    if not math.isfinite(value):
        return NONE
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"
