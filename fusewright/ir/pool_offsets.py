"""Where in its window a largest value lies, as a byte: how the place is numbered, and who asks.

A tap has an offset in its window along each axis, and its place is Σ offset · pitch. Element i of
an axis is q·stride + r, and belongs to the windows q + j for a few whole j: its offset there is
r + padding - j·stride, which may lie outside of the window. Pitches are so far apart that such a
number is no other place: one comparison says whether a window's largest value is this element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_TAPS = 32
NOWHERE = 255  # of windows that hand no gradient on, and of windows that there are not


@dataclass(frozen=True)
class Along:
    """A window along one axis."""

    taps: int
    stride: int
    padding: int = 0
    dilation: int = 1

    @property
    def last(self) -> int:
        """The offset of its last tap."""
        return (self.taps - 1) * self.dilation

    @property
    def around(self) -> range:
        """All j for which an element q·stride + r may belong to window q + j."""
        first = -((self.last - self.padding) // self.stride)
        return range(first, (self.stride - 1 + self.padding) // self.stride + 1)

    @property
    def offsets(self) -> range:
        """All that such elements have, inside of the window or not."""
        least = self.padding - self.around[-1] * self.stride
        return range(least, self.stride + self.padding - self.around[0] * self.stride)


Window = tuple[Along, ...]


def pitches(window: Window) -> tuple[int, ...] | None:
    """None where a byte is too small, or taps are many."""
    if not 0 < math.prod(along.taps for along in window) <= MOST_TAPS:
        return None
    if any(along.dilation > 1 and along.padding for along in window):
        return None  # which tap is the first inside takes a division
    found: list[int] = []
    apart, most = 0, 0
    for along in reversed(window):
        found.append(apart + 1)
        apart += found[-1] * max(along.offsets[-1], along.last - along.offsets[0])
        most += found[-1] * along.offsets[-1]
    return tuple(reversed(found)) if most < NOWHERE else None
