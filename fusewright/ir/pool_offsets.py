"""The position of a maximum in its pooling window, as a byte: the pool offset.

A tap has an offset along each axis of its window, and its pool offset is Σ offset · pitch. Element
i of an axis is q·stride + r, and belongs to the windows q + j for a few integers j: its offset
there is r + padding - j·stride, which may be outside the window. Pitches are so large that an
offset outside never equals one inside: one comparison says whether this element is a window's
maximum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_TAPS = 32
NOWHERE = 255  # of windows that return no gradient, and of windows outside the image


@dataclass(frozen=True)
class Along:
    """A pooling window along one axis."""

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
        """All offsets of such elements, inside the window or not."""
        least = self.padding - self.around[-1] * self.stride
        return range(least, self.stride + self.padding - self.around[0] * self.stride)


Window = tuple[Along, ...]


def pitches(window: Window) -> tuple[int, ...] | None:
    """The pitch of each axis; None if a byte is too small, or there are too many taps."""
    if not 0 < math.prod(along.taps for along in window) <= MOST_TAPS:
        return None
    if any(along.dilation > 1 and along.padding for along in window):
        return None  # finding the first tap inside would need a division
    found: list[int] = []
    past, most = 0, 0
    for along in reversed(window):
        found.append(past + 1)
        past += found[-1] * max(along.offsets[-1], along.last - along.offsets[0])
        most += found[-1] * along.offsets[-1]
    return tuple(reversed(found)) if most < NOWHERE else None
