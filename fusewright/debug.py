"""Log messages and dumps, controlled by two environment variables.

FUSEWRIGHT_DEBUG=0..3 sets how much goes to stderr: 0 warnings, 1 stages, 2 decisions, 3 all.
FUSEWRIGHT_DUMP=DIR makes every stage write its text to a numbered file in DIR, in the order in
which this process reaches the stages. Equal runs give equal file names, so dumps can be compared.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from fusewright.errors import FusewrightError

_LOGGER = logging.getLogger("fusewright")
_LOG_LEVELS = {1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG - 5}
_numbers = itertools.count()
_lock = threading.Lock()


def level() -> int:
    """The requested level of detail."""
    text = os.environ.get("FUSEWRIGHT_DEBUG", "0") or "0"
    if text not in {"0", "1", "2", "3"}:
        raise FusewrightError(f"FUSEWRIGHT_DEBUG={text!r}: set it to 0, 1, 2 or 3")
    return int(text)


def log(at: int, message: str, *args: object) -> None:
    """Write `message % args` to stderr if the level of detail is at least `at`."""
    if level() < at:
        return
    with _lock:
        if not _LOGGER.handlers:
            _LOGGER.addHandler(_handler())
            _LOGGER.propagate = False
    _LOGGER.setLevel(_LOG_LEVELS[level()])
    _LOGGER.log(_LOG_LEVELS[at], message, *args)


def tell(message: str, *args: object) -> None:
    """Log a warning at any level of detail, by the user's handlers or else on stderr.

    Unlike `warnings.warn`, it never becomes an error.
    """
    with _lock:
        if not _LOGGER.hasHandlers():
            _LOGGER.addHandler(_handler())
    _LOGGER.warning(message, *args)


def _handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("fusewright: %(message)s"))
    return handler


def dump(stage: str, text: str | Callable[[], str], suffix: str = ".txt") -> Path | None:
    """Write one stage's text to FUSEWRIGHT_DUMP/NN_stage; do nothing if that is not set. A text
    that takes time to make is given as a function."""
    folder = os.environ.get("FUSEWRIGHT_DUMP")
    if not folder:
        return None
    with _lock:
        number = next(_numbers)
    path = Path(folder) / f"{number:02d}_{re.sub(r'[^A-Za-z0-9.-]+', '_', stage)}{suffix}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if isinstance(text, str) else text(), encoding="utf-8")
    except OSError as error:
        raise FusewrightError(
            f"FUSEWRIGHT_DUMP={folder}: cannot write {path.name} there ({error.strerror}); "
            "choose another folder or unset it"
        ) from error
    return path
