"""Random changes of a model's Python state between calls: `python -m tests.fuzz_state --count 500`.

Eager mode is the truth: for outputs, gradients, errors, and what calls leave on the model, in its
files and in random generators. A seed that fails is printed as a small program, which lacks all
that the failure does not need. `--first SEED --count 1` repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import prune  # noqa: F401  (a change finds it as nn.utils.prune)
from torch.utils.hooks import RemovableHandle

import fusewright
from fusewright.errors import SaveError
from tests.support.precompiled import use_quick_builds
from tests.support.python_state import CIRCUMSTANCES, Case, Step, drawn

# What Dynamo's own back-end without a compiler gets wrong, too, is not ours.
PLAIN_DYNAMO = "torch.compile, eager"
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_OF_COMPILE = "_compiled_call_impl"


class Side:
    """One of the models that are compared, with files of its own."""

    def __init__(self, case: Case, folder: Path, door: str) -> None:
        text, other = case.texts
        self.files = [f"state_{case.seed}", case.other]
        self.other = _loaded(folder / f"{case.other}.py", other)
        self.own = _loaded(folder / f"state_{case.seed}.py", text)
        self.model: Any = self.own.Model()
        example = torch.linspace(-1, 1, 12).reshape(3, 4)
        if door in ("torch.compile", PLAIN_DYNAMO):
            backend = "fusewright" if door == "torch.compile" else "eager"
            self.model.compile(backend=backend)
        elif door != "eager":
            self.model = fusewright.optimize(self.model, example)
        if door == "file":
            path = fusewright.save(self.model, folder / f"state_{case.seed}_new.py")
            before, self.own = vars(self.own), _loaded(path, path.read_text())
            for name, value in before.items():  # the file keeps what forward uses
                vars(self.own).setdefault(name, value)
            fresh = self.own.ModelNew()
            fresh.load_state_dict(self.model.state_dict())
            self.model = fresh
        self.circumstances: set[str] = set()

    def change(self, step: Step) -> str:
        """Make the change of a step. Returns the error, if it cannot be made."""
        if step.change in CIRCUMSTANCES:
            self.circumstances ^= {step.change}
            return ""
        at = self.model
        with contextlib.suppress(AttributeError, IndexError):
            for name in filter(None, step.place.split(".")):
                at = at[int(name)] if name.isdigit() else getattr(at, name)
        known = {"m": at, "own": self.own, "other": self.other, "copy": copy}
        names = {**vars(self.own), **known}
        try:
            exec(step.change, names)
        except Exception as error:
            return type(error).__name__
        if not step.place:
            self.model = names["m"]
        return ""

    def result(self, size: int) -> dict[str, Any]:
        """What a call returns and leaves behind, by names."""
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(7)
        x = torch.linspace(-1, 1, 4 * size, dtype=torch.float32).reshape(size, 4)
        x.requires_grad_("detached" not in self.circumstances)
        found: dict[str, Any] = {}
        try:
            with _under(self.circumstances):
                y = self.model(x)
            found["output"] = y
            if y.requires_grad:
                named = {"x": x, **dict(self.model.named_parameters())}
                named = {name: each for name, each in named.items() if each.requires_grad}
                grads = torch.autograd.grad(y.sum(), [*named.values()], allow_unused=True)
                found |= {f"grad {name}": g for name, g in zip(named, grads, strict=True)}
        except Exception as error:
            found["error"] = type(error).__name__
            found["message"] = str(error)
        found |= {"draw": torch.rand(1), "draws": (random.random(), float(np.random.rand()))}
        for path, module in self.model.named_modules():
            found |= _state(path, vars(module))
            found |= {f"{path}.{n}": b for n, b in module._buffers.items()}
        for file in (self.own, self.other):
            found |= _state("file", {n: v for n, v in vars(file).items() if n[:1] == "v"})
        return found


def _state(path: str, names: dict[str, Any]) -> dict[str, Any]:
    left_out = {*_OF_EVERY_MODULE, _OF_COMPILE}
    held = {n: v for n, v in names.items() if n not in left_out and n[:4] != "_fw_"}
    return {f"{path}.{name}": _plain(value, 0) for name, value in held.items()}


def _plain(value: Any, depth: int) -> Any:
    """A value with all that is inside it, for a comparison."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if depth > 4 or isinstance(value, nn.Module | FunctionType | type | RemovableHandle):
        return type(value).__name__
    if isinstance(value, float | np.floating):
        return torch.tensor(value, dtype=torch.float64)  # two NaNs are the same
    if isinstance(value, bool | int | complex | str | bytes | None):
        return value
    if isinstance(value, dict):
        return {repr(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item, depth + 1) for item in value]
    if hasattr(value, "__dict__"):
        return {name: _plain(item, depth + 1) for name, item in vars(value).items()}
    return type(value).__name__


def _loaded(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _under(circumstances: set[str]) -> Iterator[None]:
    """Run calls in these circumstances."""
    with contextlib.ExitStack() as stack:
        if "inference" in circumstances:
            stack.enter_context(torch.inference_mode())
        if "no_grad" in circumstances:
            stack.enter_context(torch.no_grad())
        if "autocast" in circumstances:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        if "float64" in circumstances:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        if "deterministic" in circumstances:
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True)
        if "precision" in circumstances:
            stack.callback(torch.set_float32_matmul_precision, "highest")
            torch.set_float32_matmul_precision("high")
        yield


def failure(case: Case, door: str | None = None) -> str:
    """Where a case differs from eager mode, and after how many steps; empty if it agrees."""
    torch._dynamo.reset()
    known, before = set(sys.modules), dict(os.environ)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".*bug in Fusewright")
            return _compared(case, Path(folder), door or case.door)
    finally:
        for name in set(sys.modules) - known:
            if "state_" in name:
                del sys.modules[name]
        for name in set(os.environ) - set(before):
            del os.environ[name]
        torch._dynamo.reset()


def _compared(case: Case, folder: Path, door: str) -> str:
    places = [folder / "eager", folder / "ours"]
    for each in places:
        each.mkdir()
    eager = Side(case, places[0], "eager")
    try:
        ours = Side(case, places[1], door)
    except SaveError:
        return ""
    for at, step in enumerate(case.steps):
        refused = [side.change(step) for side in (eager, ours)]
        if refused[0] != refused[1]:
            return f"step {at}: {step.change!r}: {refused[1] or 'no error'} instead of {refused[0]}"
        for call in range(step.calls):
            wanted, found = eager.result(step.size), ours.result(step.size)
            what = _different(wanted, found)
            if what:
                return f"step {at}, call {call}: {what}"
    return ""


def _different(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    errors = [each.pop("message", "") for each in (wanted, found)]
    if "error" in wanted or "error" in found:
        if ("error" in wanted) != ("error" in found):
            return f"{found.get('error', 'no error')} {errors[1]} instead of " + (
                f"{wanted.get('error', 'no error')} {errors[0]}"
            )
        return ""
    if wanted.keys() != found.keys():
        return f"names {sorted(wanted.keys() ^ found.keys())}"
    for name, value in wanted.items():
        if not _same(value, found[name]):
            ours, eager = (" ".join(str(each).split()) for each in (found[name], value))
            return f"{name}: {ours} instead of {eager}"
    return ""


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype is other.dtype and one.shape == other.shape
        return alike and torch.allclose(one, other, atol=1e-5, rtol=1e-5, equal_nan=True)
    if isinstance(one, dict):
        return [*one] == [*other] and all(map(_same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def smallest(case: Case) -> Case:
    """The case without the states, steps and calls that its failure does not need."""
    smaller = True
    while smaller:
        smaller = False
        for each in _simpler(case):
            if failure(each):
                case, smaller = each, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    for read in case.reads:
        used = f"{read.number}"
        if not any(used in step.change and step.place for step in case.steps):
            yield case.without(read)
    for at, step in enumerate(case.steps):
        yield replace(case, steps=(*case.steps[:at], *case.steps[at + 1 :]))
        for plainer in (replace(step, calls=1), replace(step, size=3), replace(step, change="")):
            if plainer != step:
                yield replace(case, steps=(*case.steps[:at], plainer, *case.steps[at + 1 :]))
    if case.door == "file":
        yield replace(case, door="optimize")


def program(case: Case) -> str:
    """A case as a text that people read, and can run as two files and a script."""
    text, other = case.texts
    lines = [f"# state_{case.seed}.py{text}", f"# script, door: {case.door}"]
    if "{other}" in "".join(str(each) for each in case.reads) or other.count("\n") > 10:
        lines.insert(0, f"# {case.other}.py{other}")
    for step in case.steps:
        if step.change in CIRCUMSTANCES:
            lines.append(f"# {step.change}, on or off")
        elif step.change:
            lines.append(f"m = model.get_submodule({step.place!r}); {step.change}")
        lines += [f"model(torch.linspace(-1, 1, {4 * step.size}).reshape(-1, 4))"] * step.calls
    return "\n".join(lines)


def told(case: Case) -> str:
    """What is wrong with a case, with a small program; empty if nothing is."""
    wrong = failure(case)
    if not wrong or (case.door == "torch.compile" and failure(case, PLAIN_DYNAMO)):
        return ""
    small = smallest(case)
    names = [(each.name, each.reader) for each in small.reads]
    return f"seed {case.seed}: {failure(small) or wrong}\n{names}\n{program(small)}\n"


def _batch(seeds: Sequence[int]) -> list[str]:
    use_quick_builds()
    found = []
    for seed in seeds:
        try:
            found.append(told(drawn(seed)))
        except Exception as error:  # of the fuzz itself or of optimize
            found.append(f"seed {seed}: {type(error).__name__}: {error}")
    return [each for each in found if each]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.count)
    batches = [seeds[at : at + options.batch] for at in range(0, len(seeds), options.batch)]
    start, done, wrong = time.perf_counter(), 0, 0
    with ProcessPoolExecutor(
        options.jobs, get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        waiting = {pool.submit(_batch, each): each for each in batches}
        for each in as_completed(waiting):
            for words in each.result():
                wrong += 1
                print(words, flush=True)
            done += len(waiting[each])
            print(f"{done} cases, {wrong} wrong, {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
