"""Fails if it can harm the machine: by the network, by files, by other processes, by its home."""

# verdict: accepted
# device: cpu

import os
import socket
import tempfile
from pathlib import Path

from small import Model


def refused(attempt):
    try:
        attempt()
    except OSError:
        return
    raise AssertionError(f"{attempt.__name__} was possible")


def network():
    socket.create_connection(("127.0.0.1", 22), timeout=1)


def write_beside():
    (Path(__file__).parent / "written.txt").write_text("x")


def write_temporary():
    Path("/tmp/written.txt").write_text("x")


for each in (network, write_beside, write_temporary):
    refused(each)
assert not list(Path.home().iterdir())
assert os.getppid() == 1 and os.getuid() != 0
Path(tempfile.gettempdir(), "allowed.txt").write_text("x")


class ModelNew(Model):
    def forward(self, x):
        return super().forward(x)
