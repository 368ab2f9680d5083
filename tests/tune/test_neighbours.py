"""Others' use of the CPU is seen, and our own is not counted as theirs."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from fusewright.bench.table import print_record
from fusewright.page.surroundings import surroundings
from fusewright.tune import neighbours
from fusewright.tune.neighbours import Moment, other_cores
from tests.support.page_samples import ENVIRONMENT, record


def test_seconds_of_others_are_what_is_left() -> None:
    before = Moment(10.0, 100.0, 5.0)
    assert other_cores(before, Moment(12.0, 107.0, 7.0)) == pytest.approx(2.5)
    assert other_cores(before, Moment(12.0, 101.0, 7.0)) == 0.0
    assert other_cores(before, before) == other_cores(None, before) == 0.0


@pytest.mark.by_the_clock
@pytest.mark.skipif(neighbours.now() is None, reason="this system does not count")
def test_a_busy_neighbour_is_seen() -> None:
    start = neighbours.now()
    endless = subprocess.Popen([sys.executable, "-c", "while True: ..."])
    try:
        time.sleep(0.2)
        begun = neighbours.now()
        time.sleep(1.0)
        assert other_cores(begun, neighbours.now()) > 0.3
    finally:
        endless.kill()
        endless.wait()
    assert start is not None and begun is not None and begun.all_s >= start.all_s


@pytest.mark.parametrize(("cores", "told"), [(0.1, False), (1.8, True)])
def test_a_busy_machine_is_told(cores: float, told: bool) -> None:
    made = replace(record(), environment=replace(ENVIRONMENT, other_cores=cores))
    text = StringIO()
    print_record(Console(file=text, width=200), made)
    assert ("kept 1.8 of" in text.getvalue()) == told
    assert ("kept 1.8 of" in str(surroundings([made]))) == told
