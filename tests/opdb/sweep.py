"""A chunk of cases in this process: optimize all, compile their kernels together, compare each.

A line is told before each step, so that whoever reads the lines knows which case ended the process.
"""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

import fusewright
from fusewright.compile.engine import engine_of
from fusewright.errors import FusewrightError
from fusewright.runtime import call
from tests.opdb.cases import Case, Entry, cases_of
from tests.opdb.compare import differences
from tests.opdb.runs import Run, in_float64, run
from tests.opdb.together import Together

Tell = Callable[[dict[str, Any]], None]


@dataclass
class Result:
    """What became of a case.

    how: `fused` (our programs ran), `dynamo` (torch.compile with our kernels), `original` (the
    original forward ran, and the user is told why), `refused` (eager fails as well: nothing to
    compare), `skipped` (by way of torch.compile, and nobody asked for that). `wrong` says what
    differs.
    """

    case: str
    how: str = ""
    why: str = ""
    wrong: list[str] = field(default_factory=list)
    comparisons: int = 0


@dataclass
class _Waiting:
    case: Case
    model: nn.Module
    eager: Run
    fast: nn.Module | None
    result: Result


def sweep(
    entries: Iterable[Entry],
    device: str,
    tell: Tell,
    variants: Collection[str] = (),
    *,
    emulated: bool = False,
    by_dynamo: bool = True,
) -> None:
    """All cases of these entries, or those of some variants. `tell` gets steps and results. Without
    `by_dynamo`, cases are skipped whose kernels cannot be compiled together with the others."""
    together, waiting = Together(torch.device(device), emulated), []
    for entry in entries:
        tell({"step": "make", "case": str(entry)})
        try:
            found = cases_of(entry, device, variants)
        except Exception as error:
            tell({"step": "done", "case": str(entry), "how": "refused", "why": _words(error)})
            continue
        for case in found:
            tell({"step": "eager", "case": str(case)})
            made = _asked(_taken(case), together, tell)
            if made.fast is not None and not by_dynamo and _takes_dynamo(made.fast):
                tell({"step": "done", "case": str(case), "how": "skipped"})
            elif made.fast is None:
                tell({"step": "done", **asdict(made.result)})
            else:
                waiting.append(made)
    tell({"step": "build", "case": "kernels"})
    start = time.perf_counter()
    count = together.build()
    tell({"step": "built", "kernels": count, "seconds": time.perf_counter() - start})
    while waiting:
        each = waiting.pop(0)
        tell({"step": "run", "case": str(each.case)})
        _compare(each)
        tell({"step": "done", **asdict(each.result)})


def _taken(case: Case) -> Case:
    """The case, or the first of its others that eager mode takes if it does not take this one."""
    if not case.others:
        return case
    accepted = (each for each in (case, *case.others) if not _refused(each))
    return next(accepted, case)


def _refused(case: Case) -> bool:
    try:
        return bool(run(case.make(), case.inputs, case.modes[0], gradients=False).failed)
    except Exception:
        return True


def _asked(case: Case, together: Together, tell: Tell) -> _Waiting:
    """Eager's run and, if that did not fail, the optimized module."""
    result = Result(str(case))
    try:
        model = case.make()
    except Exception as error:
        result.how, result.why = "refused", _words(error)
        return _Waiting(case, nn.Identity(), Run(), None, result)
    eager = run(copy.deepcopy(model), case.inputs, case.modes[0])
    _require_a_device(eager)
    if eager.failed.startswith("forward"):
        result.how, result.why = "refused", eager.failed
        return _Waiting(case, model, eager, None, result)
    tell({"step": "optimize", "case": str(case)})
    fast = None
    try:
        with together.collecting(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".*bug in Fusewright")
            model.train(case.modes[0] == "train")
            fast = fusewright.optimize(copy.deepcopy(model), case.inputs, modes=case.modes)
    except FusewrightError as error:
        result.wrong.append(f"optimize: {_words(error)}")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        result.wrong.append(f"optimize: {_words(error)} ({where.name}, line {where.lineno})")
    return _Waiting(case, model, eager, fast, result)


def _compare(one: _Waiting) -> None:
    """With gradients, without, and with another batch if the first dimension is dynamic."""
    case, fast, result = one.case, one.fast, one.result
    assert fast is not None
    (mode,) = case.modes
    truth = in_float64(one.model, case.inputs, mode)
    call._FW_WARNED.clear()
    torch._dynamo.reset()  # all cases share a class, and Dynamo gives up after a few recompilations
    kept = {name: each.detach().clone() for name, each in fast.state_dict().items()}
    ours = run(fast, case.inputs, mode)
    _require_a_device(ours)
    result.how, result.why = _how(fast)
    result.wrong += differences(ours, one.eager, truth, case.by_element)
    result.comparisons = 1
    if result.wrong or result.how == "original":
        return
    _reset(fast, kept)
    plain = run(copy.deepcopy(one.model), case.inputs, mode, gradients=False)
    found = differences(
        run(fast, case.inputs, mode, gradients=False), plain, truth, case.by_element
    )
    result.wrong += [f"without gradients: {each}" for each in found]
    result.comparisons = 2
    if case.more and _is_dynamic(fast):
        _reset(fast, kept)
        other = run(copy.deepcopy(one.model), case.more, mode)
        if not other.failed:
            truth = in_float64(one.model, case.more, mode)
            found = differences(run(fast, case.more, mode), other, truth)
            result.wrong += [f"another batch: {each}" for each in found]
            result.comparisons = 3


def _require_a_device(made: Run) -> None:
    """After an error of the GPU nothing works in this process: another one has to go on."""
    if "CUDA error" in made.failed or "device-side assert" in made.failed:
        raise RuntimeError(made.failed)


def _takes_dynamo(fast: nn.Module) -> bool:
    engine = engine_of(fast)
    assert engine is not None
    return bool(engine.reason or engine.left_out)


def _reset(fast: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    """Buffers as they were before the first call."""
    with torch.no_grad():
        for name, each in fast.state_dict().items():
            each.copy_(kept[name])


def _how(fast: nn.Module) -> tuple[str, str]:
    engine = engine_of(fast)
    assert engine is not None
    fallbacks = engine.record.fallbacks()
    if engine.eager or fallbacks:
        return "original", next(iter(fallbacks), "")
    if _takes_dynamo(fast):
        return "dynamo", engine.reason
    return "fused", ""


def _is_dynamic(fast: nn.Module) -> bool:
    engine = engine_of(fast)
    source = engine.source if engine is not None else None
    return source is not None and any(each.program.symbols for each in source.bundle.modes)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]
