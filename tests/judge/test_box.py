"""The box for a GPU: a process may write to its own entries in /proc, and to nothing else there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fusewright.judge.box import Box
from fusewright.judge.processes import boxed_command, missing_confinement

PROBE = """
import os

def writable(path):
    try:
        os.close(os.open(path, os.O_WRONLY))
        return True
    except OSError:
        return False

print(*[path for path in (
    "/proc/self/comm", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/swappiness",
    "/proc/sysrq-trigger", "/proc/irq/default_smp_affinity", "/etc/passwd",
) if writable(path)])
"""


@pytest.mark.skipif(bool(missing_confinement()), reason=missing_confinement() or "-")
@pytest.mark.parametrize("gpu", [False, True])
def test_what_can_be_written(gpu: bool, tmp_path: Path) -> None:
    box = Box(
        command=[sys.executable, "-I", "-S", "-c", PROBE],
        confined=True,
        scratch=str(tmp_path),
        folders=["tmp"],
        closed=[],
        memory_bytes=0,
        file_bytes=1 << 20,
        cpu_s=30,
        gpu=gpu,
    )
    done = subprocess.run(boxed_command(box), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["/proc/self/comm"] if gpu else [])
