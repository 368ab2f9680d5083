"""What is around a call may fail: compilers, disks, processes, interrupts. Each gives eager's
result, with a warning where kernels are missing, or the error that says what to do."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.errors import CacheUnusable, CompileFailed, CompilerMissing
from tests.support.beside_eager import COLUMNS, Chain, pair, randn

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty cache: every optimized model asks the compiler."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(folder))
    return folder


def optimized() -> nn.Module:
    return fusewright.optimize(Chain(), randn(6, COLUMNS), modes=("eval",))


def assert_works(fast: nn.Module, model: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)


def compiler(folder: Path, text: str) -> str:
    place = folder / "compiler"
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o700)
    return str(place)


def no_compiler(monkeypatch: Patch, folder: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def failing_compiler(monkeypatch: Patch, folder: Path) -> None:
    said = 'case "$*" in *--version*) echo 1;; *) echo "internal error" >&2; exit 4;; esac'
    monkeypatch.setenv("CXX", compiler(folder, said))


def compiler_on_a_full_disk(monkeypatch: Patch, folder: Path) -> None:
    said = 'case "$*" in *--version*) echo 1;; *) echo "No space left on device" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", compiler(folder, said))


def killed_compiler(monkeypatch: Patch, folder: Path) -> None:
    monkeypatch.setenv(
        "CXX", compiler(folder, 'case "$*" in *--version*) echo 1;; *) kill -9 $$;; esac')
    )


def full_disk(monkeypatch: Patch, folder: Path) -> None:
    def refuse(*given: Any, **named: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", refuse)


def read_only_disk(monkeypatch: Patch, folder: Path) -> None:
    def refuse(*given: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    # Root may write anywhere, so the refusal is simulated at the lock, which comes first.
    monkeypatch.setattr("fusewright.build.fcntl.flock", refuse)


def file_in_the_way(monkeypatch: Patch, folder: Path) -> None:
    (folder / "cache").write_text("")


Surroundings = Callable[[Patch, Path], None]
ERRORS: dict[str, tuple[Surroundings, type[Exception], str]] = {
    "no compiler": (no_compiler, CompilerMissing, "set CXX to it"),
    "a compiler that fails": (failing_compiler, CompileFailed, "internal error"),
    "a compiler that is killed": (killed_compiler, CompileFailed, "failed with status"),
    "a compiler on a full disk": (compiler_on_a_full_disk, CompileFailed, "No space left"),
    "a full disk": (full_disk, CacheUnusable, "No space left.*set FUSEWRIGHT_CACHE"),
    "a read-only disk": (read_only_disk, CacheUnusable, "Read-only.*set FUSEWRIGHT_CACHE"),
    "a file in the way": (file_in_the_way, CacheUnusable, "cannot be made.*set FUSEWRIGHT_CACHE"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_optimize_says_what_is_wrong(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    surround, kind, words = ERRORS[name]
    with monkeypatch.context() as patch:
        surround(patch, tmp_path)
        with pytest.raises(kind, match=words):
            optimized()


@pytest.mark.parametrize("name", ERRORS)
def test_another_call_runs_the_original_forward(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A module that has kernels needs others for another dtype, and cannot get them."""
    model, fast = (copy.deepcopy(each).double() for each in pair())
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="no kernels for this"):
        ERRORS[name][0](patch, tmp_path)
        assert_works(fast, model, randn(5, COLUMNS).double())
    assert_works(fast, model, randn(4, COLUMNS).double())  # and goes on to do so


def test_an_interrupt_ends_the_build_and_leaves_the_cache_sound(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    text = 'case "$*" in *--version*) echo 1;; *) kill -INT $PPID; sleep 60;; esac'
    with monkeypatch.context() as patch:
        patch.setenv("CXX", compiler(tmp_path, text))
        # What a shell starts with `&` ignores interrupts.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                optimized()
        finally:
            signal.signal(signal.SIGINT, before)
    torch.manual_seed(0)
    fast = optimized()
    torch.manual_seed(0)
    assert_works(fast, Chain(), randn(5, COLUMNS))


def test_a_cache_that_disappears(cache: Path) -> None:
    """Kernels that are loaded stay; others are built anew."""
    first = optimized()
    x = randn(5, COLUMNS)
    before = first(x)
    shutil.rmtree(cache)
    assert torch.equal(first(x), before)
    assert optimized()(x).shape == before.shape
    assert list(cache.glob("*.so"))


def test_a_child_after_use_gives_the_same_numbers() -> None:
    """Forked after kernels have run here, with all of their threads gone."""
    _, fast = pair()
    x = randn(300, COLUMNS)
    expected = fast(x).detach()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, b"1" if torch.equal(fast(x).detach(), expected) else b"0")
        finally:
            os._exit(0)
    os.close(writing)
    said = os.read(reading, 1)
    os.close(reading)
    os.waitpid(child, 0)
    assert said == b"1"


def test_eight_threads_optimize_one_model() -> None:
    model, x = Chain(), randn(5, COLUMNS)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: fusewright.optimize(model, x, modes=("eval",)), range(8)))
        found = list(pool.map(lambda fast: fast(x).detach(), made))
    for each in found:
        torch.testing.assert_close(each, model(x).detach(), rtol=1e-5, atol=1e-5)
