"""Progress and time of the stages before compilation."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fusewright import debug
from fusewright.tune.search import OnProgress

# The share of the work that is done after each stage. Capture is a third to a half of it, in
# processor seconds of ResNet-18, ResNet-101 and GPT-2.
SHARE_CAPTURED, SHARE_PLANNED, SHARE_SCHEDULED = 0.5, 0.95, 0.98
# Objects until the next collection. Tracing and planning make millions that live to their end.
FEW_COLLECTIONS = (100_000, 50, 100)


def logged(words: str, share: float) -> None:
    """Progress for the log alone."""
    debug.log(1, "%s", words)


class Stages:
    """Says which stage is running, and counts the seconds of each."""

    def __init__(
        self,
        progress: OnProgress | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._clock = clock

    def say(self, words: str, share: float) -> None:
        """`words` begins now, and this share of all work is done."""
        if self._progress is not None:
            self._progress(words, share)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start

    @contextmanager
    def running(self, name: str, words: str, share: float) -> Iterator[None]:
        self.say(words, share)
        with self.timed(name):
            yield


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Python's garbage collector runs less often. It would search the same living objects again and
    again: on ResNet-18 it took a sixth of the time."""
    before = gc.get_threshold()
    changed = gc.isenabled() and before[0] < FEW_COLLECTIONS[0]
    if changed:
        gc.set_threshold(*FEW_COLLECTIONS)
    try:
        yield
    finally:
        if changed:
            gc.set_threshold(*before)
