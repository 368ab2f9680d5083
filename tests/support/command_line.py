"""The command line, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def fusewright(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fusewright", *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
