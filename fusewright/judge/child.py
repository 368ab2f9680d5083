"""The candidate's process: a launcher that answers the judge's requests over two pipes.

It is started before the candidate is known and keeps its own references to all that it calls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fusewright.judge.arena import Arena
from fusewright.judge.cuda import make_cuda
from fusewright.judge.device import Host
from fusewright.judge.launcher import Launcher
from fusewright.judge.wire import Node, Unpacker, packed

_READ_BYTES = 1 << 20
_MOST_BYTES = 1 << 40


def serve(launcher: Launcher, requests: int, replies: int) -> None:
    """Answer one request after the other until there are no more."""
    read, write = os.read, os.write

    def send(header: Node, blobs: Sequence[bytes]) -> None:
        for part in (packed(header, blobs), *blobs):
            rest = memoryview(part)
            while rest:
                rest = rest[write(replies, rest) :]

    send({"nonce": "ready"}, [])
    while True:
        unpacker = Unpacker(_MOST_BYTES)
        while not unpacker.is_complete:
            part = read(requests, _READ_BYTES)
            if not part:
                return
            unpacker.feed(part)
        request, blobs = unpacker.message()
        answer, sent = launcher.answer(request, blobs)
        send({**answer, "nonce": request["nonce"]}, sent)


def main() -> None:
    """The arguments: descriptors of requests, answers and memory, bytes for inputs, threads, and
    the kind of device."""
    requests, replies, memory, inputs_bytes, threads = map(int, sys.argv[1:6])
    for each in (requests, replies, memory):
        os.set_inheritable(each, False)
    torch.set_num_threads(threads)
    arena = Arena(memory, inputs_bytes)
    arena.close()  # the mapping stays
    launcher = Launcher(arena, make_cuda() if sys.argv[6] == "cuda" else Host())
    # Nobody finds the launcher by its name.
    for name in [name for name in sys.modules if name.startswith("fusewright.judge")]:
        del sys.modules[name]
    sys.argv[:] = [str(Path(sys.argv[0]).name)]
    serve(launcher, requests, replies)


if __name__ == "__main__":
    main()
