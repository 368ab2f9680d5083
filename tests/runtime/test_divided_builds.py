"""An emitted file's kernels, divided among compilers: all found, none built twice, none left."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fusewright.codegen.render import unit
from fusewright.codegen.source import MOST_PARTS, WORTH, Entry, Rendered
from fusewright.runtime import host, library
from tests.support.precompiled import gxx

ROOT = Path(__file__).resolve().parents[2]


def kernel(name: str, weight: int, terms: str = "") -> tuple[Entry, Rendered]:
    """A kernel without arguments that returns its number."""
    text = f'extern "C" int {name}() {{ return {name.removeprefix("kernel_")}; }}'
    entry = Entry(name, (), (), terms=terms)
    return entry, Rendered([text], weight, (name,), (f"{name}: none",), terms=terms)


def text_of(count: int, terms: str = "") -> str:
    made = [kernel(f"kernel_{at}", WORTH, terms if at % 2 else "") for at in range(count)]
    return unit(made, "host").text


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def with_compiler(body: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell script in place of the compiler; `$source` is the file that it is given."""
    path = folder / "compiler"
    find = 'for word; do case "$word" in *.cpp) source="$word";; esac; done'
    path.write_text(f"#!/bin/sh\n{find}\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def built(text: str) -> ctypes.CDLL:
    library_of: Any = library._fw_loader(host._fw_recipe, host._fw_build)
    found: ctypes.CDLL = library_of(text)
    return found


@pytest.mark.parametrize(
    ("kernels", "cores", "parts"), [(1, 4, 1), (3, 1, 1), (3, 2, 2), (5, 64, 5), (20, 64, 8)]
)
def test_kernels_are_divided_by_the_cores_and_all_found(
    kernels: int, cores: int, parts: int, cache: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    run = f'[ -z "$source" ] || echo run >> {tmp_path}/runs\nexec {" ".join(gxx())} "$@"'
    with_compiler(run, tmp_path, monkeypatch)
    monkeypatch.setattr(library, "_fw_cores", lambda: cores)
    text = text_of(kernels)
    for _ in range(2):
        found = built(text)
        assert [getattr(found, f"kernel_{at}")() for at in range(kernels)] == [*range(kernels)]
        assert found.fw_error_text is not None
        assert (tmp_path / "runs").read_text().split() == ["run"] * parts
    assert parts <= MOST_PARTS and len(list(cache.iterdir())) == 1


def test_parts_are_of_about_the_same_weight() -> None:
    weights = [50, 1, 2, 30, 30, 20, 1, 60, 9, 3]
    made = [kernel(f"kernel_{at}", weight) for at, weight in enumerate(weights)]
    _, *groups = unit(made, "host").text.split(library._FW_CUT)
    held = [[int(at) for at in re.findall(r"kernel_(\d+)\(\)", group)] for group in groups]
    assert sorted(at for group in held for at in group) == [*range(10)]
    sums = sorted(sum(weights[at] for at in group) for group in held)
    assert sums == [3, 4, 9, 20, 30, 30, 50, 60]


def test_kernels_of_other_precisions_stay_out_of_all_parts(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_fw_cores", lambda: 3)
    text = text_of(6, "matmuls")
    for wanted in (0, 3):
        found = built(f"#define FW_MATMULS {wanted}\n{text}")
        has = [hasattr(found, f"kernel_{at}") for at in range(6)]
        assert has == [at % 2 == 0 or wanted == 3 for at in range(6)]


def alive(pids: Path) -> list[str]:
    """Those of the processes that still run after a while; a signal takes a moment on busy cores.
    A killed one may still wait for its parent to notice."""
    command = ["ps", "-o", "pid=,stat=", "-p", ",".join(pids.read_text().split())]
    deadline, found = time.monotonic() + 10, [""]
    while found and time.monotonic() < deadline:
        states = subprocess.run(command, capture_output=True, text=True).stdout
        found = [line for line in states.splitlines() if " Z" not in line]
    return found


@pytest.mark.by_the_clock
@pytest.mark.parametrize("failing", [0, 2])
def test_a_part_that_fails_ends_the_others_and_leaves_nothing(
    failing: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    # A compiler driver that waits for the process that it has started, as g++ does.
    body = (
        f'grep -q "kernel_{failing}(" "$source" && sleep 0.5 && echo out of order >&2 && exit 7\n'
        f"sleep 60 &\necho $$ $! >> {pids}\nwait"
    )
    with_compiler(body, tmp_path, monkeypatch)
    monkeypatch.setattr(library, "_fw_cores", lambda: 3)
    start = time.perf_counter()
    with pytest.raises(RuntimeError, match=f"part_{failing}.cpp failed:\nout of order"):
        built(text_of(3))
    assert time.perf_counter() - start < 30
    assert len(pids.read_text().split()) == 4 and alive(pids) == []
    assert list(cache.iterdir()) == []


# What a shell starts with `&` ignores interrupts, and so would this process if tests ran there.
PROCESS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from fusewright.runtime import host, library
text = open(sys.argv[1]).read()
library._fw_cores = lambda: 2
found = library._fw_loader(host._fw_recipe, host._fw_build)(text)
print([getattr(found, f"kernel_{at}")() for at in range(4)])
"""


def start(text: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(text)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment, start_new_session=True,
    )  # fmt: skip


@pytest.mark.by_the_clock
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_leaves_nothing(
    times: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    with_compiler(f"sleep 60 &\necho $$ $! >> {pids}\nwait", tmp_path, monkeypatch)
    (tmp_path / "text.cpp").write_text(text_of(4))
    process = start(tmp_path / "text.cpp")
    deadline = time.monotonic() + 60
    while len(pids.read_text().split() if pids.exists() else ()) < 4:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    for _ in range(times):
        process.send_signal(signal.SIGINT)  # to Python alone
        time.sleep(0.001)
    assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
    assert alive(pids) == [] and list(cache.iterdir()) == []


def test_two_processes_may_build_at_once(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "text.cpp").write_text(text_of(4))
    running = [start(tmp_path / "text.cpp") for _ in range(2)]
    for process in running:
        said, complaints = process.communicate(timeout=120)
        assert said == "[0, 1, 2, 3]\n", complaints
    assert [each.suffix for each in cache.iterdir()] == [".so"] * len(list(cache.iterdir()))
    assert 1 <= len(list(cache.glob("emitted-*.so"))) <= 2
