"""The float64 run of a large call, slice by slice of its rows.

It needs rows that do not depend on each other. A result with rows is compared slice by slice. The
gradient of a parameter is the sum of those of all slices, and is compared if all were run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fusewright.compile.out_of_memory import is_out_of_memory
from fusewright.verify.budget import Deadline, free_memory, room_for_rows
from fusewright.verify.case import Case, Findings
from fusewright.verify.compare import Check, Values, coarse_deviation, compare, judge, misfit
from fusewright.verify.figures import Figures, is_inexact, measure
from fusewright.verify.others import eager_runs
from fusewright.verify.precision import may_use_tf32
from fusewright.verify.reference import keep_worst
from fusewright.verify.rows import Batch, worst_rows
from fusewright.verify.scenarios import PLAIN_LAYOUT, Expected, Results, Usual
from fusewright.verify.wide import WideModel, last_digit_changed

# Eager on all rows may be off by this many times its error on fewer rows, or by this much. Beyond
# that, the rows depend on each other after all. cuDNN chooses TF32 by the size of a call.
_OF_SMALLER, _FLOOR, _TF32_FLOOR = 8.0, 1e-5, 2e-3
_SLICES_AT_LEAST, _MOST_SLICES = 4, 64
_FLOAT64 = (torch.float64, torch.complex128)


@dataclass(frozen=True)
class WholeRun:
    """What eager and the candidate answered to the whole call, and how the two compare."""

    expected: Expected
    found: Results
    layout: str
    checks: Mapping[str, Check]

    @property
    def eager(self) -> Results:
        return self.expected.eager[self.layout]


@dataclass
class _Tally:
    """The float64 results so far: figures of those with rows, sums of the others.

    `others` are further right runs of the whole call. The sums with other last digits are kept
    apart.
    """

    others: Sequence[Results] = ()
    figures: dict[str, Figures] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    other_sums: dict[str, Tensor] = field(default_factory=dict)
    rows: int = 0


def float64_checks(case: Case, run: WholeRun, ends: Deadline) -> Findings:
    """The checks of a run, against float64 where that is possible."""
    batch, before = case.batch, tuple(run.checks.values())
    if batch is None:
        return Findings(before)
    if not case.independent:
        return Findings(before, ("its rows depend on each other",))
    size = min(_slice_rows(case, run, ends.left_s), case.most_rows.get("slice", batch.rows))
    try:
        while (done := _if_it_fits(case, run, batch, size, ends)) is None:
            free_memory(case.device)
            size = (size + 1) // 2
            case.most_rows["slice"] = size
    except (RuntimeError, TypeError) as error:
        words = (str(error) or type(error).__name__).splitlines()[0]
        return Findings(before, (f"no float64 run by slices ({words})",))
    tally, checks = done
    if not _is_plausible(checks, run.expected.usual):
        return Findings(before, ("its rows seem to depend on each other",))
    worst = dict(run.checks) if tally.rows < batch.rows else {}
    keep_worst(worst, checks.values())
    which = "all of its rows" if tally.rows == batch.rows else f"{tally.rows} of its rows"
    words = f"{which} were compared with float64, in slices of {size}"
    return Findings(tuple({**run.checks, **worst}.values()), (words,))


def _slice_rows(case: Case, run: WholeRun, seconds: float) -> int:
    """All rows, half of them and so on, until a slice takes neither much memory nor much time."""
    batch, whole = case.batch, case.footprint
    assert batch is not None
    gradients = whole.targets + whole.parameters
    held = 2 * (whole.inputs + 2 * whole.outputs + gradients + whole.parameters)
    scenario = run.expected.question.scenario
    per_row = case.seconds_per_row(scenario) if seconds < math.inf else 0.0
    rows, fewest, fixed = batch.rows, batch.rows // _MOST_SLICES, _wide_bytes(case, 0.0)
    room = room_for_rows(case.budget.memory_bytes, held + fixed)
    while rows > max(fewest, 1) and _wide_bytes(case, rows / batch.rows) - fixed > room:
        rows = (rows + 1) // 2
    while rows > 1 and rows * per_row * _SLICES_AT_LEAST > seconds:
        rows = (rows + 1) // 2
    return rows


def _wide_bytes(case: Case, share: float) -> float:
    """The float64 run of a share of the rows, and the sums of the gradients of parameters."""
    part = case.footprint.part(share)
    sizes = 2 * part.inputs + 2 * part.outputs + part.saved + 2 * part.targets + 2 * part.largest
    return 2 * (sizes + 3 * part.parameters)


def _if_it_fits(
    case: Case, run: WholeRun, batch: Batch, size: int, ends: Deadline
) -> tuple[_Tally, dict[str, Check]] | None:
    """The checks by slices of this size; None if it must be smaller."""
    try:
        return _run_slices(case, run, batch, size, ends)
    except RuntimeError as error:
        if not is_out_of_memory(error) or size <= max(batch.rows // _MOST_SLICES, 1):
            raise
    return None


def _run_slices(
    case: Case, run: WholeRun, batch: Batch, size: int, ends: Deadline
) -> tuple[_Tally, dict[str, Check]]:
    """The checks; if one fails, once more beside further right runs."""
    tally = _tally(case, run, batch, size, ends, _Tally(), None)
    checks = _judged(run, tally, complete=tally.rows == batch.rows)
    if not any(each.is_only_inexact for each in checks.values()):
        return tally, checks
    question, reference = run.expected.question, case.reference
    others = eager_runs(reference, question, run.layout)
    changed = last_digit_changed(question.seed)
    nudged = WideModel(reference.model, reference.feed.gradients, change=changed)
    again = _tally(case, run, batch, size, ends, _Tally(others), nudged)
    return again, _judged(run, again, complete=again.rows == batch.rows)


def _tally(
    case: Case,
    run: WholeRun,
    batch: Batch,
    size: int,
    ends: Deadline,
    tally: _Tally,
    nudged: WideModel | None,
) -> _Tally:
    reference, coarse = case.reference, _coarse(run, batch)
    wide = WideModel(reference.model, reference.feed.gradients)
    for count, rows in enumerate(_order(run, batch, size, reference.seed)):
        if count > 1 and ends.left_s <= 0:
            break  # the first and the last slice are always run
        asked = batch.question(run.expected.question, rows)
        true, other = (
            each.ask(asked, PLAIN_LAYOUT)[PLAIN_LAYOUT[0]] if each else None
            for each in (wide, nudged)
        )
        assert true is not None
        _add(tally, run, true, other, rows, coarse)
        tally.rows += len(range(*rows.indices(batch.rows)))
    return tally


def _coarse(run: WholeRun, batch: Batch) -> dict[str, float]:
    """The results with rows, and by how much an element must be off to be more than rounding."""
    return {
        name: coarse_deviation(each)
        for name, each in run.eager.items()
        if isinstance(each, Tensor) and batch.has_rows(name, each)
    }


def _order(run: WholeRun, batch: Batch, size: int, seed: int) -> Sequence[slice]:
    """All slices: the first, the last, those that differ most from eager, the rest at random."""
    starts = list(range(0, batch.rows, size))
    worst = {row // size * size for row in worst_rows(run.found, run.eager, batch)}
    rest = random.Random(seed).sample(starts, len(starts))
    ordered = dict.fromkeys((starts[0], starts[-1], *sorted(worst), *rest))
    return [slice(start, start + size) for start in ordered]


def _add(
    tally: _Tally,
    run: WholeRun,
    part: Results,
    other: Results | None,
    rows: slice,
    coarse: Mapping[str, float],
) -> None:
    """Add one slice: its float64 results, and those with other last digits."""
    for name, true in part.items():
        eager, ours = run.eager.get(name), run.found.get(name)
        nudged = other.get(name) if other is not None else None
        if not isinstance(true, Tensor) or not isinstance(eager, Tensor):
            continue
        if name in coarse:
            whole = (ours, eager, None, *(each.get(name) for each in tally.others))
            runs = [each[rows] if isinstance(each, Tensor) else None for each in whole]
            here = measure(true, eager[rows], [*runs, nudged], coarse[name])
            before = tally.figures.get(name)
            tally.figures[name] = before.joined(here) if before else here
        elif name.startswith("grad ") and is_inexact(true):
            _add_to(tally.sums, name, true)
            _add_to(tally.other_sums, name, nudged)


def _add_to(sums: dict[str, Tensor], name: str, value: object) -> None:
    if isinstance(value, Tensor):
        sums[name] = sums[name] + value if name in sums else value


def _judged(run: WholeRun, tally: _Tally, *, complete: bool) -> dict[str, Check]:
    """The checks against float64; those of sums only if all rows are in them."""
    checks = {}
    for name, figures in tally.figures.items():
        values = _values(run, name, None)
        truer = isinstance(values.eager, Tensor) and values.eager.dtype not in _FLOAT64
        checks[name] = misfit(name, values) or judge(name, values, figures, float64=truer)
    for name, true in tally.sums.items() if complete else ():
        others = [each.get(name) for each in tally.others] + [tally.other_sums.get(name)]
        checks[name] = compare(name, replace(_values(run, name, true), others=others))
    return checks


def _values(run: WholeRun, name: str, truth: Tensor | None) -> Values:
    expected = run.expected
    gradient = name.startswith("grad ")
    usual = expected.usual_gradient_rms if gradient else expected.usual_rms
    return Values(run.found.get(name), run.eager[name], truth, usual)


def _is_plausible(checks: Mapping[str, Check], usual: Mapping[str, Usual]) -> bool:
    """Whether eager is about as exact on all rows as on fewer."""
    floor = _TF32_FLOOR if may_use_tf32() else _FLOOR
    return all(
        check.noise or check.eager_error <= max(_OF_SMALLER * usual[name].error, floor)
        for name, check in checks.items()
        if name in usual
    )
