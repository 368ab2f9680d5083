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
# An element compares itself with every window around it. If it is a tap of few of them, as in
# volumes with dilation and stride, PyTorch's scattered gradient reads less.
LEAST_SHARED = 0.2
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
    def around(self) -> tuple[int, ...]:
        """All j for which an element q·stride + r may be a tap of window q + j."""
        first = -((self.last - self.padding) // self.stride)
        near = range(first, (self.stride - 1 + self.padding) // self.stride + 1)
        return tuple(j for j in near if self._taps_at(j))

    @property
    def offsets(self) -> range:
        """All offsets of such elements, inside the window or not."""
        least = self.padding - self.around[-1] * self.stride
        return range(least, self.stride + self.padding - self.around[0] * self.stride)

    @property
    def shared(self) -> float:
        """Of how many of the windows around it an element is a tap, as a share of them. Elements
        between all windows do not count."""
        held = [self._taps_at(j) for j in self.around]
        return sum(map(len, held)) / (len(set().union(*held)) * len(held))

    def _taps_at(self, j: int) -> set[int]:
        """All r for which element q·stride + r is a tap of window q + j."""
        offsets = {r: r + self.padding - j * self.stride for r in range(self.stride)}
        inside = {r for r, each in offsets.items() if 0 <= each <= self.last}
        return {r for r in inside if offsets[r] % self.dilation == 0}


Window = tuple[Along, ...]


def pitches(window: Window) -> tuple[int, ...] | None:
    """The pitch of each axis; None if a byte is too small, there are too many taps, or elements
    are taps of few of the windows around them."""
    if not 0 < math.prod(along.taps for along in window) <= MOST_TAPS:
        return None
    if math.prod(along.shared for along in window) < LEAST_SHARED:
        return None
    found: list[int] = []
    past, most = 0, 0
    for along in reversed(window):
        found.append(past + 1)
        past += found[-1] * max(along.offsets[-1], along.last - along.offsets[0])
        most += found[-1] * along.offsets[-1]
    return tuple(reversed(found)) if most < NOWHERE else None
