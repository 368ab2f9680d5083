"""Bugs of our own: they must not stop a model that eager mode can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fusewright.errors import FusewrightError, InternalError


@contextmanager
def reported(stage: str) -> Iterator[None]:
    """An error that nobody expected becomes an InternalError, after which PyTorch runs the model.

    To be used where only our own code runs, none of the user's.
    """
    try:
        yield
    except (FusewrightError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InternalError(f"{stage} failed: {type(error).__name__}: {error}") from error
