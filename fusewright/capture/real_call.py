"""The surroundings of a real call that the user did not ask for: nobody notices it.

The watch of random generators belongs to the whole process, so one thread makes such a call at a
time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from fusewright.capture.silence import silenced
from fusewright.runtime import call

_LOCK = threading.RLock()


@contextlib.contextmanager
def real_call() -> Iterator[None]:
    """Show no warnings, whose turn comes when the user calls the model; count none of them as
    shown. Hide what is saved for backward from hooks, such as those of a checkpoint."""
    hidden = torch.autograd.graph.saved_tensors_hooks(_same, _same)
    with _LOCK, torch.inference_mode(False), hidden, silenced():
        shown = set(call._FW_WARNED)
        try:
            yield
        finally:
            call._FW_WARNED.intersection_update(shown)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
