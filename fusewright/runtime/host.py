"""How an emitted file compiles host kernels: it calls the C++ compiler, without torch headers."""

import _thread
import contextlib
import os
import pathlib
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import typing

from fusewright.runtime.library import _fw_divided

# The same flags as in Fusewright's build.py, so that users run the code that was checked.
_FW_FLAGS = (
    "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=off "
    "-fopenmp -shared -fPIC"
)


def _fw_recipe() -> list[str]:
    """Flags, compiler and processor: different machines may share a home folder."""
    facts = pathlib.Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else [platform.processor()]
    processor = sorted({line for line in lines if not line.startswith(("processor", "cpu MHz"))})
    return [_FW_FLAGS, platform.machine(), os.environ.get("CXX", "c++"), *processor]


def _fw_build(text: str, name: str, folder: pathlib.Path) -> None:
    """Compile into `folder`. RuntimeError if the compiler is missing or fails."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(f"the C++ compiler {compiler[0]!r} is missing; install g++ or set CXX")
    command = [*compiler, *_FW_FLAGS.split(), "-o"]
    sources = _fw_divided(text, folder, ".cpp")
    objects = [f"{source}.o" for source in sources]
    pairs = zip(objects, sources, strict=True)
    _fw_run_all([[*command, made, "-c", source] for made, source in pairs])
    _fw_run_all([[*command, str(folder / f"{name}.so"), *objects]])


class _FwNoted:
    """A context that notes the error that ends it, or None, and goes on."""

    def __init__(self, outcome: list[BaseException | None]) -> None:
        self.outcome = outcome

    def __enter__(self) -> "_FwNoted":
        return self

    def __exit__(self, kind: typing.Any, error: BaseException | None, trace: typing.Any) -> bool:
        self.outcome.append(error)
        return True


class _FwAwaited:
    """A context whose end, once the thread has `begun`, waits for its outcome. Interrupts that come
    meanwhile are dropped."""

    begun = False

    def __init__(self, outcome: list[BaseException | None]) -> None:
        self.outcome = outcome

    def __enter__(self) -> "_FwAwaited":
        return self

    def __exit__(self, kind: typing.Any, error: BaseException | None, trace: typing.Any) -> None:
        if isinstance(error, RuntimeError):  # there can be no more threads
            return
        while self.begun and not self.outcome:
            with contextlib.suppress(BaseException):
                time.sleep(0.01)


def _fw_run_all(commands: list[list[str]]) -> None:
    """Run commands side by side. If one fails, or the user interrupts, the others are ended.

    Python raises an interrupt in the main thread, after any call there: a compiler just started
    would be lost, and a lock just taken would stay locked. So another thread runs the compilers
    while this one holds `wanted`, which it gives back without a call of Python. It takes no other
    lock, not even those of `threading`.
    """
    outcome: list[BaseException | None] = []
    wanted = _thread.allocate_lock()

    def run() -> None:
        with _FwNoted(outcome):
            _fw_run_while(wanted, commands)

    with _FwAwaited(outcome) as awaited, wanted:
        awaited.begun = True  # no interrupt comes between this line and the start of the thread
        _thread.start_new_thread(run, ())
        while not outcome:
            time.sleep(0.01)
    failed = [each for each in outcome if each is not None]
    outcome.clear()
    if failed:
        raise failed.pop()  # a name for it here would keep it, and with it all frames


def _fw_run_while(wanted: _thread.LockType, commands: list[list[str]]) -> None:
    with contextlib.ExitStack() as ends:
        running: list[typing.Any] = []
        for command in commands:
            if not wanted.locked():
                return
            said = ends.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            # In a session of its own, `_fw_end` reaches what the compiler has started, too.
            process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
            ends.callback(_fw_end, process)
            running.append((process, command, said))
        while running and wanted.locked():
            time.sleep(0.01)
            for process, command, said in running:
                if process.poll():
                    said.seek(0)
                    raise RuntimeError(f"{shlex.join(command)} failed:\n{said.read()}")
            running = [each for each in running if each[0].returncode is None]


def _fw_end(process: typing.Any) -> None:
    """End a compiler with the processes that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
