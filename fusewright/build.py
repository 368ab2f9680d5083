"""From source text to a loaded shared library, through a cache that can be trusted.

An artifact's name is a digest of everything that decides its bytes: text, flags, compiler and,
for host code, the processor. Its folder belongs to the user alone. A library appears by an atomic
rename, with a file of its digest, and is used only while the two agree. A build holds a file lock,
which the operating system releases when the process ends: a killed build never blocks the next.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fusewright import debug
from fusewright.codegen.source import Source
from fusewright.errors import BuildError, CacheUnusable, CompileFailed, CompilerMissing

# Multiplications and additions are not contracted into fused ones: a value that backward computes
# again must be the same bit for bit as in forward, or x == amax(x) would hold nowhere.
_HOST_FLAGS = (
    "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=off "
    "-fopenmp -shared -fPIC"
).split()
# nvcc's -O concerns host code only: kernels are always fully optimized. The entry point of a matmul
# takes 1.1 µs with -O1 and -O3 and 2.0 with -O0; gcc takes 5.1, 6.5 and 2.3 s for 74 of them.
_CUDA_FLAGS = "-std=c++17 -O1 -fmad=false -shared -Xcompiler -fPIC".split()
# From this release on nvcc can compile the kernels of a file on several cores: with two it takes a
# third less time, and the code is the same to the bit (checked with 13.0).
_SPLITTING = (12, 6)
_SUFFIX = {"host": ".cpp", "cuda": ".cu"}
# Environment variables that change what the compilers do and are not on the command line.
_COMPILER_ENVIRONMENT = {
    "host": ("CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX"),
    "cuda": ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CPATH"),
}
_WORDS_LINES = 20
MOST_COMPILERS = 4  # for one source


@dataclass(frozen=True)
class Artifact:
    """A shared library in the cache; `seconds` is how long this call waited for it."""

    path: Path
    seconds: float
    cached: bool
    command: tuple[str, ...]


@dataclass(frozen=True)
class _Job:
    """One library to build: the command without its file names, and where the result belongs. The
    compiler may use this many `cores`; 0 means all."""

    source: Source
    command: tuple[str, ...]
    folder: Path
    key: str
    cores: int
    running: list[subprocess.Popen[str]]

    @property
    def library(self) -> Path:
        return self.folder / f"{self.key}.so"

    @property
    def digest(self) -> Path:
        return self.folder / f"{self.key}.sha256"

    @property
    def kept_source(self) -> Path:
        return self.folder / f"{self.key}{_SUFFIX[self.source.language]}"


def build(
    source: Source,
    *,
    cache_dir: Path | None = None,
    arch: str = "sm_90a",
    compiler: str | None = None,
    cores: int = 0,
    running: list[subprocess.Popen[str]] | None = None,
) -> Artifact:
    """The library for this source, from the cache or compiled.

    The compiler may use this many `cores`; 0 means all. Its process is added to `running`.
    """
    start = time.perf_counter()
    command = (*find_compiler(source.language, compiler), *_flags(source.language, arch))
    folder, started = trusted_folder(cache_dir), [] if running is None else running
    job = _Job(source, command, folder, _key(source, command), cores, started)
    cached = _is_sound(job)
    if not cached:
        with writing_cache(job.folder), _locked(job):
            # Another process or thread may have built it while this one waited.
            cached = _is_sound(job)
            if not cached:
                _compile(job)
    seconds = time.perf_counter() - start
    debug.log(1, "%s %s in %.2f s", "reused" if cached else "built", job.library, seconds)
    return Artifact(job.library, seconds, cached, command)


def build_divided(source: Source, *, arch: str) -> list[Artifact]:
    """Several libraries, built in parallel, that together have all kernels of the source."""
    cores = processors()
    parts = source.divided(min(cores, MOST_COMPILERS))
    if len(parts) == 1:
        return [build(source, arch=arch)]
    running: list[subprocess.Popen[str]] = []
    each = max(1, cores // len(parts))
    with ThreadPoolExecutor(len(parts)) as pool:
        jobs = [pool.submit(build, x, arch=arch, cores=each, running=running) for x in parts]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            # A build has failed, or the user has interrupted, which only this thread notices.
            while wait(jobs, timeout=0.1).not_done:
                for process in running:
                    process.kill()
            raise
    return [job.result() for job in jobs]


def processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Libraries:
    """Several libraries as one: an entry point is taken from the first that has it."""

    def __init__(self, artifacts: Sequence[Artifact]) -> None:
        self._opened = [load(each) for each in artifacts]

    def __getattr__(self, name: str) -> Any:
        for library in self._opened:
            if (found := getattr(library, name, None)) is not None:
                return found
        raise AttributeError(name)


def load(artifact: Artifact) -> ctypes.CDLL:
    """Open the library in this process."""
    try:
        return ctypes.CDLL(str(artifact.path))
    except OSError as error:
        # A library that cannot be opened must not be used again: without a digest it is rebuilt.
        with suppress(OSError):
            artifact.path.with_suffix(".sha256").unlink()
        raise BuildError(
            f"{artifact.path} was built but cannot be loaded: {error}\n"
            f"command: {shlex.join(artifact.command)}\n"
            "It will be rebuilt next time; if the error persists, check the compiler's libraries."
        ) from error


def find_compiler(language: str, compiler: str | None = None) -> tuple[str, ...]:
    """The words that start the compiler, such as ('/usr/bin/g++',) or ('ccache', 'g++')."""
    variable = "FUSEWRIGHT_NVCC" if language == "cuda" else "CXX"
    chosen = compiler or os.environ.get(variable)
    if chosen:
        words = shlex.split(chosen)
        found = shutil.which(words[0]) if words else None
        if found is None:
            named = "it was given as `compiler`" if compiler else f"{variable} names it"
            raise CompilerMissing(
                f"compiler {chosen!r} was not found ({named}); {_remedy(language)}"
            )
        return (found, *words[1:])
    for candidate in _usual_compilers(language):
        found = shutil.which(candidate)
        if found is not None:
            return (found,)
    what = "CUDA compiler (nvcc)" if language == "cuda" else "C++ compiler"
    raise CompilerMissing(f"no {what} was found; {_remedy(language)}")


def _usual_compilers(language: str) -> tuple[str, ...]:
    if language == "host":
        return ("g++", "clang++", "c++")
    home = os.environ.get("CUDA_HOME")
    return (*((f"{home}/bin/nvcc",) if home else ()), "nvcc", "/usr/local/cuda/bin/nvcc")


def _remedy(language: str) -> str:
    if language == "cuda":
        return (
            "install the CUDA toolkit, or set FUSEWRIGHT_NVCC (its nvcc) or CUDA_HOME (its folder)"
        )
    return "install one (such as `apt install g++`), or set CXX to it"


def _flags(language: str, arch: str) -> tuple[str, ...]:
    if language == "host":
        return tuple(_HOST_FLAGS)
    match = re.fullmatch(r"sm_(\d+[af]?)", arch)
    if match is None:
        raise BuildError(f"{arch!r} is not a GPU architecture; write it like sm_80 or sm_90a")
    return (*_CUDA_FLAGS, "-gencode", f"arch=compute_{match[1]},code={arch}")


def _key(source: Source, command: tuple[str, ...]) -> str:
    parts = [source.language, source.text, *command, _identity(command[0])]
    for name in _COMPILER_ENVIRONMENT[source.language]:
        parts.append(f"{name}={os.environ.get(name, '')}")
    if source.language == "host":
        parts.append(_processor())
    # With lengths, no two lists of parts give the same text.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _identity(program: str) -> str:
    status = Path(program).stat()
    return _compiler_identity(program, status.st_mtime_ns, status.st_size)


@cache
def _compiler_identity(program: str, _mtime_ns: int, _size: int) -> str:
    """The compiler's version text. The other arguments make a changed file be asked again."""
    command = [program, "--version"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CompileFailed(
            f"{program} cannot be run: {error}; set CXX or FUSEWRIGHT_NVCC"
        ) from error
    if asked.returncode != 0:
        raise CompileFailed(
            f"{shlex.join(command)} failed with status {asked.returncode}: the compiler is broken; "
            f"repair it, or set CXX or FUSEWRIGHT_NVCC to another\n{first_lines(asked.stderr)}"
        )
    return asked.stdout


@cache
def _processor() -> str:
    """What -march=native depends on: machines that share a cache may have other processors."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
    lines = [platform.machine(), platform.processor()]
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0]
        lines += [line for line in first.splitlines() if line.split("\t")[0].strip() in wanted]
    return "\n".join(lines)


def trusted_folder(cache_dir: Path | None) -> Path:
    """The cache folder, created if necessary; refused if other users can write to it."""
    folder = (cache_dir or _default_folder()).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise CacheUnusable(_cache_message(folder, f"cannot be made: {error.strerror}")) from error
    if status.st_uid != os.geteuid():
        raise CacheUnusable(_cache_message(folder, f"belongs to another user ({status.st_uid})"))
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"can be written by others (chmod 700 {shlex.quote(str(folder))})"
        raise CacheUnusable(_cache_message(folder, why))
    return folder


def _default_folder() -> Path:
    if chosen := os.environ.get("FUSEWRIGHT_CACHE"):
        return Path(chosen)
    # By the XDG specification, a relative path is ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(base) if base.startswith("/") else Path.home() / ".cache"
    except RuntimeError as error:
        raise CacheUnusable("there is no home folder; set FUSEWRIGHT_CACHE to a folder") from error
    return home / "fusewright"


def _cache_message(folder: Path, why: str) -> str:
    return f"cache folder {folder} {why}; set FUSEWRIGHT_CACHE to a folder of your own"


@contextmanager
def writing_cache(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}"
        raise CacheUnusable(_cache_message(folder, why)) from error


@contextmanager
def _locked(job: _Job) -> Iterator[None]:
    # Each call opens the file itself, so the lock also works between threads. The file stays: if it
    # were removed, two builds could hold two locks of the same name.
    with (job.folder / f"{job.key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _is_sound(job: _Job) -> bool:
    try:
        expected = job.digest.read_text()
        return expected == hashlib.sha256(job.library.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def _compile(job: _Job) -> None:
    prefix = f"{job.key}.tmp-"
    for left in job.folder.glob(f"{prefix}*"):
        # Since this build holds the lock, such a folder can only be left by a killed build.
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=job.folder) as work:
        text = Path(work, job.kept_source.name)
        text.write_text(job.source.text, encoding="utf-8")
        text.replace(job.kept_source)
        library = Path(work, job.library.name)
        _run_compiler(job, library, work)
        digest = Path(work, job.digest.name)
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        # A kill between these two lines leaves an old digest, which does not fit: a rebuild.
        library.replace(job.library)
        digest.replace(job.digest)


def _run_compiler(job: _Job, library: Path, work: str) -> None:
    command = [*job.command, *_splitting(job), "-o", str(library), str(job.kept_source)]
    debug.log(2, "%s", shlex.join(command))
    environment = {**os.environ, "TMPDIR": work}
    try:
        # The compiler's temporary files go to the working folder and are deleted with it.
        code, said = _said(command, environment, job.running)
    except OSError as error:
        raise CompileFailed(f"{command[0]} cannot be run: {error}") from error
    if code != 0:
        why = f"failed with status {code}"
    elif not library.is_file():
        why = "succeeded but wrote no library"
    else:
        return
    words = first_lines(said) or "(the compiler printed nothing)"
    raise CompileFailed(
        f"the {job.source.language} compiler {why}\ncommand: {shlex.join(command)}\n"
        f"source: {job.kept_source}\n{words}"
    )


def _said(
    command: list[str], environment: dict[str, str], running: list[subprocess.Popen[str]]
) -> tuple[int, str]:
    """A command's exit status and its output."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environment
    ) as process:
        running.append(process)
        try:
            words, complaints = process.communicate()
        except BaseException:
            process.kill()
            raise
    return process.returncode, complaints or words


def _splitting(job: _Job) -> tuple[str, ...]:
    """The flag for several cores. Not in the key: the library's bytes do not depend on it."""
    if job.source.language == "host":
        return ()
    found = re.search(r"release (\d+)\.(\d+)", _identity(job.command[0]))
    new = found is not None and (int(found[1]), int(found[2])) >= _SPLITTING
    return (f"--split-compile={job.cores}",) if new and job.cores != 1 else ()


def first_lines(text: str) -> str:
    lines = text.strip().splitlines()
    rest = len(lines) - _WORDS_LINES
    return "\n".join([*lines[:_WORDS_LINES], *([f"… {rest} more lines"] if rest > 0 else [])])
