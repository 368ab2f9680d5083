"""Texts of tests in the place of our own emitted one, which `bench` measures in its process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fusewright.bench import run
from fusewright.bench.record import Record, Settings


def bench_as_ours(
    problem: Path, files: Sequence[Path], settings: Settings, command: str = ""
) -> Record:
    """One run for each file; the results of all in one record, under the files' names."""
    records = [_one(problem, each, settings, command) for each in files]
    names = [each.stem for each in files]
    first = records[0]
    facts = [each for each in first.candidates if each.name != "ours"]
    for name, record in zip(names, records, strict=True):
        facts += [replace(e, name=name) for e in record.candidates if e.name == "ours"]
    passes = []
    for index, each in enumerate(first.passes):
        results = [e for e in each.results if e.candidate != "ours"]
        for name, record in zip(names, records, strict=True):
            mine = (e for e in record.passes[index].results if e.candidate == "ours")
            results += [replace(e, candidate=name) for e in mine]
        passes.append(replace(each, results=tuple(results)))
    return replace(first, candidates=tuple(facts), passes=tuple(passes))


def _one(problem: Path, file: Path, settings: Settings, command: str) -> Record:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_optimized", lambda *given: run.Ours(path=file))
        return run.bench(problem, [], settings, command=command)
