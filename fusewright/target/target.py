"""What is compiled for: `Target`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

HOPPER_SHARED_BYTES = 228 * 1024
SHARED_BYTES = 48 * 1024
TRIALS = ("halves", "sweeping")


@dataclass(frozen=True)
class Target:
    """What is compiled for: language 'cuda' or 'host', the number of processors, and how much
    shared memory each of them has.

    `tensor_cores`: whether it has those that our matrix products and convolutions are written for,
    Hopper's. `tf32`: whether PyTorch's library may round the products that it is given instead of
    them; `computing`: whether it may round what it convolves, so that ours lay out images as
    halves, and compute them on that way. `turning`: whether loops may turn tiles in shared memory,
    and PyTorch's convolutions so run in channels-last. Off until a GPU has shown what they gain
    (TRIALS): `halves`, whether products in 16 bits are ours; `sweeping`, whether convolutions of
    ours also reduce what they write, and whether they and products end in a logsumexp.
    """

    language: str
    sms: int = 132
    tensor_cores: bool = False
    tf32: bool = False
    turning: bool = False
    halves: bool = False
    sweeping: bool = False
    shared_bytes: int = 0
    computing: bool = False

    @property
    def online(self) -> bool:
        """Whether loops that would read memory again rather compute more in one sweep, or hold
        columns in registers."""
        return self.language == "cuda"

    @staticmethod
    def host() -> Target:
        return Target("host", 1)

    @staticmethod
    def cuda(
        sms: int = 132,
        tensor_cores: bool = True,
        trials: Collection[str] = (),
        shared_bytes: int = HOPPER_SHARED_BYTES,
        tf32: bool = False,
        computing: bool = True,
    ) -> Target:
        given = {each: each in trials for each in TRIALS} | {"computing": computing}
        return Target("cuda", sms, tensor_cores, tf32, True, shared_bytes=shared_bytes, **given)
