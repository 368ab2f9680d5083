"""Bugs of our own: they must not stop a model that eager mode can run."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusewright import debug
from fusewright.compile.out_of_memory import is_out_of_memory
from fusewright.errors import FusewrightError, InternalError


@contextmanager
def reported(stage: str) -> Iterator[None]:
    """An error that nobody expected becomes an InternalError, after which PyTorch runs the model.

    To be used where only our own code runs, none of the user's.
    """
    try:
        yield
    except (FusewrightError, OSError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        debug.log(1, "%s", "".join(traceback.format_exception(error)))
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        words = ": ".join(filter(None, (type(error).__name__, str(error))))
        raise InternalError(f"{stage} failed in {where}: {words}") from error
