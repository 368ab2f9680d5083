"""The judge's end of a candidate's process: asks it, waits for it, captures its words, ends it."""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusewright.judge.arena import Arena
from fusewright.judge.box import Box, set_dumpable
from fusewright.judge.memory import PeakOf
from fusewright.judge.processes import (
    TOKEN,
    boxed_command,
    cpu_seconds,
    end_all,
    memory_limit,
    run_ns,
    stop_below,
    was_woken,
)
from fusewright.judge.wire import BadMessage, Node, Unpacker, packed

_MOST_OUTPUT_BYTES = 1 << 16
_READ_BYTES = 1 << 20
_SPARE_BYTES = 1 << 26
_GENTLE_END_S = 5.0
# A thread that is said to be stopped may still be on its way off its core.
_MOST_RUN_NS = 100_000
# Tokens of the processes that run now. While there is one, nobody may look into this process.
_RUNNING: set[str] = set()
_PASSED_ON = "PATH LANG LC_ALL CXX CC CUDA_HOME LD_LIBRARY_PATH TERM VIRTUAL_ENV TZ".split()
# GPUs that the user hides stay hidden.
_PREFIXES = ("OMP_", "MKL_", "KMP_", "OPENBLAS_", "CUDA_VISIBLE_", "NVIDIA_TF32_")


@dataclass(frozen=True)
class Limits:
    """What a candidate may use: seconds for everything it does, and bytes."""

    seconds: float = 300.0
    memory_bytes: int = 0
    file_bytes: int = 1 << 32


class Ended(Exception):
    """The candidate's process ended before it answered; `code` is its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with code {code}")
        self.code = code


class Late(Exception):
    """The candidate's process used up its time."""


class Restless(Exception):
    """The candidate's processes ran while they had to stand still."""


# Why there is no answer that can be read.
UNANSWERED = (Ended, Late, BadMessage, Restless)


@dataclass(frozen=True)
class Gone:
    """The answer to `go`, and the seconds that it took.

    If it was weighed, what the processes held before it, and how much more at its peak.
    """

    header: Node
    results: list[bytes]
    seconds: float
    peak_bytes: int | None
    held_bytes: int | None


class CandidateProcess:
    """A process that answers requests; use it as a context manager, and nothing of it is left."""

    def __init__(
        self, limits: Limits, arena: Arena, *, confined: bool, device: str = "cpu"
    ) -> None:
        self.limits, self.arena = limits, arena
        self.confined, self.device = confined, device
        self.output, self.cut = bytearray(), False
        self.left_s = limits.seconds
        self._ends = 0.0
        self._token = secrets.token_hex(16)
        self._stopped: list[int] = []
        self._ran_ns: dict[int, int] = {}

    def __enter__(self) -> CandidateProcess:
        self._scratch = Path(tempfile.mkdtemp(prefix="fusewright-judge-"))
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._words, words = os.pipe()
        os.set_blocking(self._requests, False)
        passed = (requests, replies, self.arena.descriptor)
        facts = (self.arena.inputs_bytes, torch.get_num_threads(), self.device)
        launcher = [sys.executable, "-u", "-P", "-B", "-m", "fusewright.judge.child"]
        box = Box(
            command=[*launcher, *map(str, (*passed, *facts))],
            confined=self.confined,
            scratch=str(self._scratch),
            folders=["tmp", "home", "cache"],
            closed=[*passed],
            memory_bytes=self._memory_bytes(),
            file_bytes=self.limits.file_bytes,
            cpu_s=int(self.limits.seconds * (os.cpu_count() or 1)) + 60,
            gpu=self.device == "cuda",
        )
        set_dumpable(False)  # a stranger of the same user must not read the answers here
        self._process = subprocess.Popen(
            boxed_command(box),
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            env=self._environment(),
            pass_fds=passed,
            start_new_session=True,
        )
        _RUNNING.add(self._token)
        for each in (requests, replies, words):
            os.close(each)
        return self

    def _memory_bytes(self) -> int:
        """Addresses that it may use; 0 for all, because CUDA reserves far more than it uses."""
        if self.device == "cuda":
            return 0
        return (self.limits.memory_bytes or memory_limit()) + self.arena.size

    def _environment(self) -> dict[str, str]:
        """Little of the user's own, an empty home, and caches that end with the judgement."""
        mine = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        mine |= {k: v for k, v in os.environ.items() if k.startswith(_PREFIXES)}
        cache = str(self._scratch / "cache")
        named = ("XDG_CACHE_HOME", "FUSEWRIGHT_CACHE", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR")
        return {
            **mine,
            **dict.fromkeys((*named, "TORCHINDUCTOR_CACHE_DIR"), cache),
            **dict.fromkeys(("USER", "LOGNAME"), "candidate"),
            TOKEN: self._token,
            "HOME": str(self._scratch / "home"),
            "TMPDIR": str(self._scratch / "tmp"),
            **({} if self.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}),
            "PYTHONPATH": os.pathsep.join(str(Path(each).absolute()) for each in sys.path if each),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def __exit__(self, *error: object) -> None:
        for each in (self._requests, self._replies):
            os.close(each)
        with suppress(Restless):
            self.wake()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_GENTLE_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_all(self._token)
        self._read_words()
        os.close(self._words)
        _RUNNING.discard(self._token)
        set_dumpable(not _RUNNING)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def terminate(self) -> None:
        """End it; whoever waits for an answer, in another thread, gets `Ended`."""
        self._process.send_signal(signal.SIGTERM)

    def started(self) -> None:
        """Wait until the launcher is there; the candidate is not loaded yet."""
        self._ends = time.monotonic() + self.limits.seconds
        if self._received(_SPARE_BYTES)[0].get("nonce") != "ready":
            raise BadMessage("the launcher did not report")

    def ask(
        self, request: Node, blobs: Sequence[bytes], expected_bytes: int
    ) -> tuple[Node, list[bytes]]:
        """The answer to a request; raises Ended, Late or BadMessage if there is none.

        An answer that is far larger than the expected one is not read.
        """
        nonce = secrets.token_hex(16)
        self._ends = time.monotonic() + self.left_s
        self.wake()
        try:
            for part in (packed({**request, "nonce": nonce}, blobs), *blobs):
                self._send(part)
            header, found = self._received(4 * expected_bytes + _SPARE_BYTES)
        finally:
            self.left_s = self._ends - time.monotonic()
        return _belonging(header, nonce), found

    def go(self, write: Callable[[], None], expected_bytes: int, *, weigh: bool) -> Gone:
        """Let a prepared call begin, and wait until its results are here.

        All processes of the candidate are stopped while `write` puts the inputs into the arena,
        so that nobody can begin before the clock does. The results are taken at once, in a random
        order, so that nobody can send an answer and still work on it.
        """
        nonce = secrets.token_hex(16)
        message = packed({"do": "go", "nonce": nonce}, [])
        self.stop()
        write()
        weight = PeakOf(self._stopped) if weigh else None
        self._ends = time.monotonic() + self.left_s
        try:
            start = time.perf_counter()
            self.wake()
            self._send(message)
            header, found = self._received(4 * expected_bytes + _SPARE_BYTES)
            seconds = time.perf_counter() - start
        finally:
            self.left_s = self._ends - time.monotonic()
        results = self._taken(_belonging(header, nonce))
        self.stop()
        peak = weight.taken(self._stopped) if weight else None
        held = weight.held if weight else None
        return Gone(header, [*results, *found], seconds, peak, held)

    def _taken(self, header: Node) -> list[bytes]:
        """The results in the arena, as the header describes them."""
        sizes = header.get("placed", [])
        if not isinstance(sizes, list) or not all(type(e) is int and e >= 0 for e in sizes):
            raise BadMessage("the sizes of the results cannot be read")
        if not self.arena.has_room(sizes):
            raise BadMessage("the results are larger than the memory for them")
        return self.arena.taken(sizes)

    def cpu_s(self) -> float:
        """What its processes have used of the CPU."""
        return cpu_seconds(self._process.pid)

    def stop(self) -> None:
        """Stop all threads of all processes of the candidate; returns when they stand still."""
        self._stopped = stop_below(self._process.pid)
        self._ran_ns = run_ns(self._stopped)

    def wake(self) -> None:
        """Let them go on; Restless if one ran meanwhile, because a timer or a signal woke it."""
        now = run_ns(self._ran_ns)
        restless = any(map(was_woken, self._ran_ns)) or any(
            now[pid] > ran + _MOST_RUN_NS for pid, ran in self._ran_ns.items()
        )
        for pid in self._stopped:
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        self._stopped, self._ran_ns = [], {}
        if restless:
            raise Restless

    def _send(self, part: bytes) -> None:
        rest = memoryview(part)
        while rest:
            self._wait(reading=False)
            try:
                rest = rest[os.write(self._requests, rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise Ended(self._code()) from None

    def _received(self, most_bytes: int) -> tuple[Node, list[bytes]]:
        unpacker = Unpacker(most_bytes)
        while not unpacker.is_complete:
            self._wait(reading=True)
            part = os.read(self._replies, _READ_BYTES)
            if not part:
                raise Ended(self._code())
            unpacker.feed(part)
        return unpacker.message()

    def _wait(self, *, reading: bool) -> None:
        """Until the pipe is ready; what the candidate prints is read meanwhile."""
        pipe = self._replies if reading else self._requests
        while True:
            left = self._ends - time.monotonic()
            if left <= 0:
                raise Late
            readers: list[Any] = [self._words, *([pipe] if reading else [])]
            found, writable, _ = select.select(readers, [] if reading else [pipe], [], left)
            if self._words in found and not self._read_words():
                raise Ended(self._code())
            if pipe in found or pipe in writable:
                return

    def _read_words(self) -> bool:
        """Keep the first words; False at their end."""
        os.set_blocking(self._words, False)
        try:
            part = os.read(self._words, _READ_BYTES)
        except BlockingIOError:
            return True
        room = _MOST_OUTPUT_BYTES - len(self.output)
        self.output += part[:room]
        self.cut = self.cut or len(part) > room
        return bool(part)

    def _code(self) -> int:
        with suppress(Restless):
            self.wake()
        try:
            return self._process.wait(_GENTLE_END_S)
        except subprocess.TimeoutExpired:
            return -1


def _belonging(header: Node, nonce: str) -> Node:
    if header.get("nonce") != nonce:
        raise BadMessage("an answer does not belong to its request")
    error = header.get("error", {"type": "", "words": ""})
    if not isinstance(error, dict) or not all(type(error.get(n)) is str for n in ("type", "words")):
        raise BadMessage("an error is not described as the launcher does it")
    return header
