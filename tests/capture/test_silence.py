"""Warnings that are not shown while a block runs."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

from fusewright.capture.silence import silenced


def test_warnings_are_shown_again_after_the_block() -> None:
    with pytest.warns(UserWarning, match="after") as seen:
        with silenced():
            warnings.warn("inside", UserWarning, stacklevel=1)
        warnings.warn("after", UserWarning, stacklevel=1)
    assert len(seen) == 1


def test_one_kind_of_warning() -> None:
    with pytest.warns(UserWarning, match="other") as seen, silenced("Error in "):
        warnings.warn("Error in a layer", UserWarning, stacklevel=1)
        warnings.warn("other", UserWarning, stacklevel=1)
    assert len(seen) == 1


def test_an_equal_filter_of_the_user_stays() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before: list[Any] = list(warnings.filters)
        with silenced(), silenced():
            pass
        assert list(warnings.filters) == before


@pytest.mark.parametrize("catches", [False, True], ids=["two of ours", "beside catch_warnings"])
def test_blocks_of_two_threads_that_overlap(catches: bool) -> None:
    """The first to begin is the first to end."""
    before: list[Any] = list(warnings.filters)
    begun, ended = threading.Event(), threading.Event()

    def second() -> None:
        with warnings.catch_warnings() if catches else silenced():
            begun.set()
            ended.wait(10)

    thread = threading.Thread(target=second)
    with silenced():
        thread.start()
        begun.wait(10)
    ended.set()
    thread.join()
    assert list(warnings.filters) == before
