"""What this machine offers to hold a stranger's process, and what is left of it afterwards."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fusewright.errors import ConfinementError
from fusewright.judge import box
from fusewright.judge.box import Box, descendants, entry, numbers

# In the environment of all processes of one judgement.
TOKEN = "FUSEWRIGHT_JUDGE_TOKEN"
_TRIAL_S = 20.0
_SWEEPS = 50
# The states of a thread that is stopped or has ended.
_STANDING = (b"T", b"t", b"Z", b"X")
_WAITING = b"S"
_STOP_S, _STOP_PAUSE_S = 5.0, 5e-5
_GIB = 1 << 30


@functools.cache
def missing_confinement() -> str:
    """Why a process cannot be confined here; empty if it can."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces of Linux"
    with tempfile.TemporaryDirectory(prefix="fusewright-box-") as folder:
        trial = Box(
            command=[sys.executable, "-I", "-S", "-c", "raise SystemExit(0)"],
            confined=True,
            scratch=folder,
            folders=["tmp"],
            closed=[],
            memory_bytes=4 * _GIB,
            file_bytes=_GIB,
            cpu_s=int(_TRIAL_S),
        )
        done = subprocess.run(
            boxed_command(trial), capture_output=True, text=True, timeout=_TRIAL_S, check=False
        )
    return "" if done.returncode == 0 else done.stderr.strip() or f"code {done.returncode}"


def require_confinement(wanted: bool) -> None:
    """ConfinementError if a box is wanted and this machine cannot make one."""
    if wanted and (missing := missing_confinement()):
        raise ConfinementError(
            f"this machine cannot confine a stranger's process ({missing}); if you trust the file, "
            "use --unconfined: limits of time and memory hold, but network and files are open"
        )


def boxed_command(wanted: Box) -> list[str]:
    return [sys.executable, "-I", "-S", str(Path(box.__file__)), wanted.as_argument()]


def with_token(token: str) -> list[int]:
    """All processes of one judgement, wherever they moved to."""
    mark = f"{TOKEN}={token}".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def end_all(token: str) -> None:
    """Kill every process of a judgement until none is left."""
    for _ in range(_SWEEPS):
        left = with_token(token)
        if not left:
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def stop_below(root: int) -> list[int]:
    """Stop all processes below one, and return them when each of their threads stands still.

    It waits at most five seconds for each.
    """
    stopped: list[int] = []
    for _ in range(_SWEEPS):
        new = [pid for pid in descendants(root) if pid not in stopped]
        if not new:
            break
        for pid in new:
            with suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        stopped += new
        ends = time.monotonic() + _STOP_S
        while any(map(is_running, new)) and time.monotonic() < ends:
            time.sleep(_STOP_PAUSE_S)
    return stopped


def run_ns(pids: Iterable[int]) -> dict[int, int]:
    """How long each process has run on any core, in all of its threads, as the scheduler counts."""
    found = {}
    for pid in pids:
        threads = f"/proc/{pid}/task"
        read = (entry(f"{threads}/{each}/schedstat").split() for each in numbers(threads))
        found[pid] = sum(int(fields[0]) for fields in read if fields)
    return found


def cpu_seconds(root: int) -> float:
    """What all processes below one have used of the CPU; those that have ended do not count."""
    ticks = 0
    for pid in descendants(root):
        fields = entry(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    """Whether a thread of a process neither stands still nor has ended."""
    return any(each not in _STANDING for each in _states(pid))


def was_woken(pid: int) -> bool:
    """Whether a thread of a process waits for something: a stopped thread does not.

    A thread that has not come to a stop yet, in a long read or on a busy machine, has another
    state.
    """
    return _WAITING in _states(pid)


def _states(pid: int) -> list[bytes]:
    """The state of each thread, as the scheduler calls it."""
    threads = f"/proc/{pid}/task"
    read = (
        entry(f"{threads}/{each}/stat").rpartition(b")")[2].split() for each in numbers(threads)
    )
    return [fields[0] for fields in read if fields]


def memory_limit() -> int:
    """Three quarters of the machine's memory, and at least 8 GiB of addresses."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return max(8 * _GIB, pages * size * 3 // 4)
