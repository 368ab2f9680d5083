"""What all tests share: a cache, quiet defaults, and GPU tests only where there is a GPU."""

from __future__ import annotations

import gc
import os
import random
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from _pytest.runner import runtestprotocol

from fusewright import build
from fusewright.compile import mistakes, solution
from fusewright.plan import rows
from fusewright.rewrite import convolutions
from fusewright.runtime import call, tensor_cores
from tests.support.emulated_modules import use_tensor_cores
from tests.support.precompiled import quick_flags

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    # Kept between runs, so that the second `make test` finds its kernels built.
    os.environ.setdefault("FUSEWRIGHT_CACHE", str(ROOT / ".pytest_cache" / "kernels"))
    # Tests ignore schedules that were tuned on this machine; tests of tuning switch them on.
    os.environ["FUSEWRIGHT_TUNED"] = "0"


def pytest_collection_finish() -> None:
    # Imported objects stay: garbage collections, of which tracing causes many, skip them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.split("[")[0]
        sample = item.get_closest_marker("sample")
        if sample and (sample.args[0] == 0 or seen[name] % sample.args[0]):
            item.add_marker(pytest.mark.slow)
        seen[name] += 1
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="PyTorch sees no CUDA device here"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test by the clock once more if it fails, and say so: the machine may have been busy."""
    if item.get_closest_marker("by_the_clock") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    failed = [each for each in reports if each.failed]
    if failed:
        item.warn(pytest.PytestWarning(f"failed at first: {failed[0].longreprtext[-2000:]}"))
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for each in reports:
        item.ihook.pytest_runtest_logreport(report=each)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FUSEWRIGHT_DEBUG", raising=False)
    monkeypatch.delenv("FUSEWRIGHT_DUMP", raising=False)
    call._FW_WARNED.clear()  # A reason is told once in a process; each test is told anew.
    yield


@pytest.fixture(autouse=True)
def _quickly_built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """g++ would take most of the tests' time: with -Og it takes a third of that with -O3.

    Other processes, and tests with the mark, build with the flags that users have.
    """
    if request.node.get_closest_marker("as_users_build") is None:
        monkeypatch.setattr(build, "_HOST_FLAGS", quick_flags())


@pytest.fixture(autouse=True)
def _kernels_that_differ_fail(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test fails where `optimize` finds that kernels differ from eager. It would run the original
    forward then, and a test of kernels would compare eager with eager."""
    if request.node.get_closest_marker("may_differ") is not None:
        return
    asked = solution.found_different

    def agreed(*given: Any) -> str:
        found = asked(*given)
        assert not found, found
        return found

    monkeypatch.setattr(solution, "found_different", agreed)


@pytest.fixture(autouse=True)
def _bugs_fail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test fails where `optimize` would run the original forward because of a bug of ours."""
    if request.node.get_closest_marker("has_a_bug") is not None:
        return

    class NothingOfTheKind(Exception):
        pass

    def failing(words: str) -> AssertionError:
        return AssertionError(words)

    monkeypatch.setattr(mistakes, "InternalError", failing)
    monkeypatch.setattr(solution, "InternalError", NothingOfTheKind)


@pytest.fixture(autouse=True)
def _repeatable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same random values in every run, whatever ran before: failures repeat.

    `verify` and `bench` draw random seeds; here these are fixed too. tests/fuzz.py tries others.
    """
    seed = crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    random.seed(seed)
    monkeypatch.setattr(secrets, "randbits", random.Random(seed).getrandbits)


@pytest.fixture
def examples() -> tuple[Path, ...]:
    """The four reference problems."""
    return tuple(sorted(p for p in (ROOT / "examples").glob("*.py") if "_new" not in p.stem))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes of convolutions for which cuDNN's precision was queried; the answer is always
    TF32."""
    found: list[str] = []

    def rounds(of: tensor_cores._FwPass) -> bool:
        found.append(of.which)
        return True

    monkeypatch.setattr(tensor_cores, "_FW_ROUNDS", {})
    monkeypatch.setattr(tensor_cores, "_fw_rounds", rounds)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


@pytest.fixture
def operands_unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is rounded to TF32 for PyTorch's weight gradients."""
    monkeypatch.setitem(tensor_cores._FW_TF32_FLAGS, True, tensor_cores._FW_TF32_FLAGS[False])


@pytest.fixture
def reduces_small_convolutions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reduce the results of small convolutions, too, in their epilogues, in full float32."""
    use_tensor_cores(monkeypatch)
    monkeypatch.setattr(convolutions, "FEWEST_CHANNELS", 1)
    monkeypatch.setattr(rows, "ROW_BYTES", 0)  # as if no row fitted into shared memory
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before
