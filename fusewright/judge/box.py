"""Runs one command in a box: its own namespaces, limits, and an end that nothing outlives.

This file is a program of its own, which imports the standard library only. Its argument is JSON
with the fields of `Box`. Exit code 125 means that the box could not be made; the reason
is on stderr. 124 means too many processes, and 123 that one of them protects itself from being
killed when memory runs out. All other codes are those of the command, and 128 + n stands for
signal n.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

NO_BOX, TOO_MANY, PROTECTED = 125, 124, 123

_USER, _MOUNTS, _NETWORK, _PIDS, _IPC = 0x10000000, 0x20000, 0x40000000, 0x20000000, 0x08000000
_RECURSIVE, _PRIVATE, _BIND = 0x4000, 0x40000, 0x1000
_NOSUID_NODEV = 0x2 | 0x4
_MOUNT_SETATTR, _HERE, _WITH_ALL_BELOW, _READ_ONLY = 442, -100, 0x8000, 0x1
_PDEATHSIG, _DUMPABLE, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 36, 38
_INSIDE_ID = 1000  # of root: a user other than root loses all capabilities when it starts a program
# Empty inside: sockets of other programs are there. Shared memory is the box's own.
_HIDDEN, _SHARED_MEMORY, _PROC = "/run", "/dev/shm", "/proc"
_SPARE_PROCESSES = 512
_MOST_SCRATCH_BYTES = 1 << 32
_PAUSE_S, _PAUSES = 0.02, 10
_MOST_ENTRY_BYTES = 1 << 12
_SCORE, _HIGHEST_SCORE = "oom_score_adj", 1000

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Box:
    """What to run and how; `scratch` is the only folder that the command can write to.

    It has `folders` in it, and the command starts in the first one. A confined command finds it in
    memory, of limited size. `closed` are descriptors that only the command may hold. A limit of
    0 is none. With `gpu`, processes may write to their own entries in /proc, as CUDA must.
    """

    command: list[str]
    confined: bool
    scratch: str
    folders: list[str]
    closed: list[int]
    memory_bytes: int
    file_bytes: int
    cpu_s: int
    gpu: bool = False

    def as_argument(self) -> str:
        return json.dumps(asdict(self))


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user")]


def set_dumpable(wanted: bool) -> None:
    """Whether processes of the same user may look into this one's memory."""
    libc.prctl(_DUMPABLE, int(wanted), 0, 0, 0)


def _require(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


def _enter_namespaces() -> None:
    """Become a user without rights outside, with no network and no view of other processes."""
    user, group = os.getuid(), os.getgid()
    _require(libc.unshare(_USER | _NETWORK | _PIDS | _IPC), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user or _INSIDE_ID} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group or _INSIDE_ID} {group} 1")


def _mount(target: str, kind: str, flags: int, options: str = "") -> None:
    names = (kind.encode(), target.encode(), kind.encode())
    _require(libc.mount(*names, flags, options.encode()), f"mount {target}")


def _set_read_only(folder: str, wanted: bool) -> None:
    change = _MountAttributes(*((_READ_ONLY, 0) if wanted else (0, _READ_ONLY)), 0, 0)
    flags = _WITH_ALL_BELOW if wanted else 0
    size = ctypes.sizeof(change)
    found = libc.syscall(_MOUNT_SETATTR, _HERE, folder.encode(), flags, ctypes.byref(change), size)
    _require(found, f"make {folder} {'read-only' if wanted else 'writable'}")


def _close_file_system(scratch: str, gpu: bool) -> None:
    """Everything is read-only but for one folder; processes outside do not show in /proc."""
    _require(libc.unshare(_MOUNTS), "unshare the mounts")
    _require(libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None), "make mounts private")
    own = [scratch, *([_SHARED_MEMORY] if Path(_SHARED_MEMORY).is_dir() else [])]
    for folder in [*own, *([_HIDDEN] if Path(_HIDDEN).is_dir() else [])]:
        _mount(folder, "tmpfs", _NOSUID_NODEV, f"mode=700,size={_MOST_SCRATCH_BYTES}")
    with suppress(OSError):  # some containers forbid it; the parent's memory is closed all the same
        _mount(_PROC, "proc", _NOSUID_NODEV)
        own += [_PROC] if gpu else []
    _set_read_only("/", True)
    for folder in own:
        _set_read_only(folder, False)
    if _PROC in own:
        _protect_machine()


def _protect_machine() -> None:
    """What in /proc belongs to the machine, and not to one process, stays read-only.

    Root outside would otherwise be the owner of the kernel's settings inside, too.
    """
    for each in Path(_PROC).iterdir():
        if each.name.isdecimal() or each.is_symlink():
            continue
        path = str(each)
        _require(libc.mount(path.encode(), path.encode(), None, _BIND, None), f"bind {path}")
        _set_read_only(path, True)


def _offer_to_be_killed() -> None:
    """If memory runs out, the kernel ends this process and those below it before all others.

    Where root on the machine says so, nobody below can take it back. Elsewhere `_watched` looks.
    """
    with suppress(OSError):
        Path("/proc/self", _SCORE).write_text(str(_HIGHEST_SCORE))


def _score(process: int | str) -> int:
    """How early the kernel ends a process when memory runs out; the highest for an ended one."""
    with suppress(OSError, ValueError):
        return int(Path("/proc", str(process), _SCORE).read_text())
    return _HIGHEST_SCORE


def _limit(box: Box) -> None:
    kinds = {
        resource.RLIMIT_AS: box.memory_bytes,
        resource.RLIMIT_FSIZE: box.file_bytes,
        resource.RLIMIT_CPU: box.cpu_s,
        resource.RLIMIT_NPROC: _threads_of_user() + _SPARE_PROCESSES,
    }
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind, most in kinds.items():
        if not most:
            continue
        _, hard = resource.getrlimit(kind)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (allowed, allowed))


def _threads_of_user() -> int:
    """The kernel counts all threads of a user against the limit, those outside as well."""
    count = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError, StopIteration, ValueError):
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            if int(fields["Uid"].split()[0]) == os.getuid():
                count += int(fields["Threads"])
    return count


def _run(box: Box) -> NoReturn:
    """Become the command."""
    for name in box.folders:
        Path(box.scratch, name).mkdir(exist_ok=True)
    os.chdir(Path(box.scratch, box.folders[0]))
    _limit(box)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.execv(box.command[0], box.command)


def _fork_command(box: Box) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _run(box)
        except BaseException as error:
            _fail(error)
    for descriptor in box.closed:
        os.close(descriptor)
    return pid


def _fail(error: BaseException) -> NoReturn:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(NO_BOX)


def _status_code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _reap_until(pid: int) -> int:
    """Wait for one child, and for all orphans that end meanwhile."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return _status_code(status)


def numbers(folder: str) -> list[int]:
    """The processes or threads of a folder of /proc; none if it is gone."""
    with suppress(OSError), os.scandir(folder) as found:
        return [int(each.name) for each in found if each.name.isdecimal()]
    return []


def entry(path: str) -> bytes:
    """A small file of /proc; nothing if it is gone. A judgement reads thousands, so it is fast."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _MOST_ENTRY_BYTES)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def descendants(root: int) -> Iterator[int]:
    """All processes below one, as /proc shows them."""
    parents: dict[int, list[int]] = {}
    for number in numbers(_PROC):
        fields = entry(f"{_PROC}/{number}/stat").rpartition(b")")[2].split()
        if len(fields) > 1:
            parents.setdefault(int(fields[1]), []).append(number)
    waiting = list(parents.get(root, ()))
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += parents.get(pid, ())


def _kill_descendants() -> None:
    """Until none is left: this process adopts every orphan below it."""
    while below := list(descendants(os.getpid())):
        for pid in below:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue


def _harm() -> int:
    """The code of what the processes below do to the machine; 0 if it is nothing.

    The kernel does not hold root to the limit on processes.
    """
    below, mine = list(descendants(os.getpid())), _score("self")
    if len(below) > _SPARE_PROCESSES:
        return TOO_MANY
    return PROTECTED if any(_score(each) < mine for each in below) else 0


def _watched(pid: int) -> int:
    """Wait for one child, and end everything below it that does harm."""
    watch = 0
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return _status_code(status)
        if not ended:
            time.sleep(_PAUSE_S)
            watch += 1
            if watch % _PAUSES == 0 and (code := _harm()):
                _kill_descendants()
                return code


def _fork_first(box: Box) -> int:
    """The first process of a namespace of processes: when it ends, the kernel ends all others."""
    _enter_namespaces()
    set_dumpable(False)
    first = os.fork()
    if first == 0:
        try:
            libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _close_file_system(box.scratch, box.gpu)
            os._exit(_reap_until(_fork_command(box)))
        except BaseException as error:
            _fail(error)
    for descriptor in box.closed:
        os.close(descriptor)
    return first


def main() -> None:
    """Run the command of the first argument, then end all that it left behind."""
    box = Box(**json.loads(sys.argv[1]))

    def ended(number: int, frame: FrameType | None) -> NoReturn:
        _kill_descendants()
        os._exit(128 + number)

    libc.prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, ended)
    _offer_to_be_killed()
    try:
        code = _watched(_fork_first(box) if box.confined else _fork_command(box))
    except OSError as error:
        _fail(error)
    _kill_descendants()
    os._exit(code)


if __name__ == "__main__":
    main()
