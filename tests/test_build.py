"""Builds: cached, shared between processes and threads, and with clear errors."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fusewright import build as building
from fusewright.build import Artifact, build, find_compiler, load
from fusewright.codegen.source import Entry, Piece, Source
from fusewright.errors import BuildError, CacheUnusable, CompileFailed, CompilerMissing

pytestmark = pytest.mark.as_users_build
GXX = shutil.which("g++") or "g++"
ROOT = Path(__file__).resolve().parents[1]


def host(value: int) -> Source:
    return Source("host", f'extern "C" int answer() {{ return {value}; }}\n', ())


def script(folder: Path, body: str, name: str = "compiler") -> str:
    """A fake compiler: a shell script that answers --version and then runs `body`."""
    path = folder / name
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo fake && exit 0\n{body}\n')
    path.chmod(0o755)
    return str(path)


def counting(folder: Path) -> str:
    return script(folder, f'echo run >> {folder}/runs\nsleep 0.3\nexec {GXX} "$@"')


@pytest.mark.parametrize(("release", "split"), [("12.5", 0), ("12.6", 1), ("13.0", 1)])
def test_nvcc_builds_on_all_cores_where_it_can(release: str, split: int, tmp_path: Path) -> None:
    path = tmp_path / "nvcc"
    said = f'[ "$1" = --version ] && echo "tools, release {release}, V{release}.9" && exit 0'
    path.write_text(f'#!/bin/sh\n{said}\necho "$@" >> {tmp_path}/given\nexit 1\n')
    path.chmod(0o755)
    with pytest.raises(CompileFailed):
        build(Source("cuda", "", ()), cache_dir=tmp_path / "cache", compiler=str(path))
    assert (tmp_path / "given").read_text().split().count("--split-compile=0") == split


def kernels(*weights: int) -> Source:
    """Each returns its index."""
    pieces = [
        Piece(f'extern "C" int kernel_{at}() {{ return {at}; }}', weight, "FW_OTHERS")
        for at, weight in enumerate(weights)
    ]
    text = "\n\n".join(["static int shared = 7;", *(each.text for each in pieces)]) + "\n"
    entries = tuple(Entry(f"kernel_{at}", (), ()) for at in range(len(pieces)))
    return Source("host", text, entries, tuple(pieces))


@pytest.mark.parametrize(
    ("weights", "most", "held"),
    [
        ((1, 5, 1), 4, [{0, 1, 2}]),  # not worth it
        ((29, 29, 29, 29), 1, [{0, 1, 2, 3}]),
        ((1, 29, 29, 5, 29, 29), 2, [{1, 3, 4}, {0, 2, 5}]),
        ((17, 17, 5, 2), 4, [{0, 2}, {1, 3}]),
    ],
)
def test_kernels_are_divided_among_compilers(
    weights: tuple[int, ...], most: int, held: list[set[int]]
) -> None:
    parts = kernels(*weights).divided(most)
    found = [{int(each) for each in re.findall(r"kernel_(\d+)\(", part.text)} for part in parts]
    assert sorted(map(sorted, found)) == sorted(map(sorted, held)), found
    assert all("static int shared" in part.text for part in parts)


def test_excluded_kernels_do_not_count_in_the_division() -> None:
    source = kernels(29, 29, 29, 29)
    pieces = tuple(
        replace(each, macro=name)
        for each, name in zip(source.pieces, ("FW_A", "FW_A", "FW_B", "FW_B"), strict=True)
    )
    for left, count in ((3, 4), (0, 2)):
        text = f"#define FW_A {left}\n{source.text}"
        assert len(replace(source, text=text, pieces=pieces).divided(4)) == count


def test_several_libraries_act_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "processors", lambda: 3)
    built = building.build_divided(kernels(29, 29, 29, 5, 1), arch="native")
    assert len({each.path for each in built}) == 3 and not any(each.cached for each in built)
    library = building.Libraries(built)
    assert [getattr(library, f"kernel_{at}")() for at in range(5)] == [0, 1, 2, 3, 4]
    assert not hasattr(library, "kernel_5")
    again = building.build_divided(kernels(29, 29, 29, 5, 1), arch="native")
    assert all(each.cached for each in again) and {e.path for e in again} == {e.path for e in built}


@pytest.mark.by_the_clock
@pytest.mark.parametrize("failing", [0, 1])
def test_one_failing_compiler_ends_the_others(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f'for last; do :; done\ngrep -q "kernel_{failing}(" "$last" || exec sleep 60\nexit 7'
    monkeypatch.setenv("CXX", script(tmp_path, body))
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "processors", lambda: 2)
    start = time.perf_counter()
    with pytest.raises(CompileFailed, match="status 7"):
        building.build_divided(kernels(29, 29), arch="native")
    assert time.perf_counter() - start < 30
    assert leftovers(tmp_path / "cache") == []


def test_compilers_side_by_side_share_the_cores(tmp_path: Path) -> None:
    """A single compiler may use all of them."""
    path = tmp_path / "nvcc"
    said = '[ "$1" = --version ] && echo "tools, release 13.0, V13.0.9" && exit 0'
    path.write_text(f'#!/bin/sh\n{said}\necho "$@" >> {tmp_path}/given\nexit 1\n')
    path.chmod(0o755)
    for cores in (0, 1, 4):
        with pytest.raises(CompileFailed):
            cache = tmp_path / "cache"
            build(Source("cuda", "", ()), cache_dir=cache, compiler=str(path), cores=cores)
    flags = re.findall(r"--split-compile=\d", (tmp_path / "given").read_text())
    assert flags == ["--split-compile=0", "--split-compile=4"]


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".tmp-" in path.name]


def test_the_second_build_comes_from_the_cache(tmp_path: Path) -> None:
    first = build(host(41), cache_dir=tmp_path / "cache")
    second = build(host(41), cache_dir=tmp_path / "cache")
    assert (first.cached, second.cached) == (False, True)
    assert first.path == second.path
    assert load(second).answer() == 41
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert leftovers(tmp_path / "cache") == []


def test_the_key_covers_text_flags_compiler_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(source: Source, command: tuple[str, ...]) -> str:
        return building._key(source, command)

    other = script(tmp_path, f'exec {GXX} "$@"')
    keys = [key(host(1), (GXX,)), key(host(2), (GXX,)), key(host(1), (GXX, "-g"))]
    keys.append(key(host(1), (other,)))
    script(tmp_path, f'# changed\nexec {GXX} "$@"')
    keys.append(key(Source("cuda", host(1).text, ()), (GXX,)))
    monkeypatch.setattr(building, "_processor", lambda: "another processor")
    keys.append(key(host(1), (GXX,)))
    monkeypatch.setenv("CPATH", "/elsewhere")
    keys.append(key(host(1), (GXX,)))
    assert len(set(keys)) == len(keys)


def test_a_damaged_library_is_built_again(tmp_path: Path) -> None:
    first = build(host(42), cache_dir=tmp_path)
    whole = first.path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1] + b"x", b""):
        # A new file: the old one may be mapped by this process.
        first.path.unlink()
        first.path.write_bytes(damaged)
        again = build(host(42), cache_dir=tmp_path)
        assert not again.cached
        assert load(again).answer() == 42
    first.path.with_suffix(".sha256").unlink()
    assert not build(host(42), cache_dir=tmp_path).cached


def test_eight_threads_compile_once(tmp_path: Path) -> None:
    compiler = counting(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        made = list(
            pool.map(
                lambda _: build(host(8), cache_dir=tmp_path / "cache", compiler=compiler),
                range(8),
            )
        )
    assert sorted(each.cached for each in made) == [False] + [True] * 7
    assert {load(each).answer() for each in made} == {8}
    assert (tmp_path / "runs").read_text() == "run\n"


PROCESS = """
import sys
from pathlib import Path
from fusewright.build import build, load
from fusewright.codegen.source import Source
source = Source("host", sys.argv[1], ())
made = build(source, cache_dir=Path(sys.argv[2]), compiler=sys.argv[3])
print(made.cached, load(made).answer())
"""


def start(source: Source, cache: Path, compiler: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, source.text, str(cache), compiler]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def test_two_processes_compile_once(tmp_path: Path) -> None:
    compiler = counting(tmp_path)
    running = [start(host(2), tmp_path / "cache", compiler) for _ in range(2)]
    said = sorted(process.communicate(timeout=60)[0].strip() for process in running)
    assert said == ["False 2", "True 2"]
    assert (tmp_path / "runs").read_text() == "run\n"


@pytest.mark.by_the_clock
def test_a_killed_build_blocks_nobody(tmp_path: Path) -> None:
    # The first time this compiler hangs half-way, its library half written.
    hang = f'[ -e {tmp_path}/hung ] && exec {GXX} "$@"\ntouch {tmp_path}/hung\nsleep 60'
    compiler = script(tmp_path, hang)
    cache = tmp_path / "cache"
    process = start(host(9), cache, compiler)
    deadline = time.monotonic() + 30
    while not (tmp_path / "hung").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    # Only Python is killed: its compiler lives on, as it would after an out-of-memory kill.
    process.kill()
    process.wait()
    assert len(leftovers(cache)) == 1
    begun = time.monotonic()
    made = build(host(9), cache_dir=cache, compiler=compiler)
    assert time.monotonic() - begun < 20
    assert load(made).answer() == 9
    assert leftovers(cache) == []
    os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    process.stdout.close()


def test_a_refused_source_shows_the_command_message_and_file(tmp_path: Path) -> None:
    source = Source("host", "int broken( {\n", ())
    with pytest.raises(CompileFailed) as caught:
        build(source, cache_dir=tmp_path)
    words = str(caught.value)
    assert "-march=native" in words
    assert "error:" in words
    kept = next(line for line in words.splitlines() if line.startswith("source: "))
    assert Path(kept.removeprefix("source: ")).read_text() == source.text
    assert leftovers(tmp_path) == []
    assert len(words.splitlines()) < 30


BROKEN = {
    "fails": ("echo no licence >&2; exit 3", "status 3(.|\n)*no licence"),
    "says nothing": ("exit 1", "the compiler printed nothing"),
    "writes nothing": ("exit 0", "succeeded but wrote no library"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_compiler_is_named(kind: str, tmp_path: Path) -> None:
    body, words = BROKEN[kind]
    compiler = script(tmp_path, body)
    with pytest.raises(CompileFailed, match=words) as caught:
        build(host(1), cache_dir=tmp_path / "cache", compiler=compiler)
    assert compiler in str(caught.value)


def test_a_compiler_that_cannot_say_its_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "compiler"
    path.write_text("#!/bin/sh\necho out of order >&2\nexit 2\n")
    path.chmod(0o755)
    with pytest.raises(CompileFailed, match=r"--version failed with status 2(.|\n)*out of order"):
        build(host(1), cache_dir=tmp_path / "cache", compiler=str(path))
    path.write_bytes(b"\x7fELF nonsense")
    with pytest.raises(CompileFailed, match="cannot be run"):
        build(host(1), cache_dir=tmp_path / "cache", compiler=str(path))


def test_a_library_that_cannot_be_opened_is_built_anew(tmp_path: Path) -> None:
    body = f'[ -e {tmp_path}/repaired ] && exec {GXX} "$@"\n'
    body += 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"'
    compiler = script(tmp_path, body)
    made = build(host(5), cache_dir=tmp_path / "cache", compiler=compiler)
    with pytest.raises(BuildError, match="cannot be loaded"):
        load(made)
    (tmp_path / "repaired").touch()
    assert load(build(host(5), cache_dir=tmp_path / "cache", compiler=compiler)).answer() == 5


def test_no_compiler_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "CUDA_HOME", "FUSEWRIGHT_NVCC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CompilerMissing, match=r"no C\+\+ compiler.*set CXX"):
        build(host(1), cache_dir=tmp_path)
    monkeypatch.setattr(building, "_usual_compilers", lambda language: ("nvcc",))
    with pytest.raises(CompilerMissing, match=r"nvcc.*CUDA toolkit.*FUSEWRIGHT_NVCC.*CUDA_HOME"):
        build(Source("cuda", "", ()), cache_dir=tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerMissing, match=r"'no-such-compiler' was not found .CXX names it"):
        build(host(1), cache_dir=tmp_path)


def test_compilers_are_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home" / "bin").mkdir(parents=True)
    (tmp_path / "path").mkdir()
    in_path = script(tmp_path / "path", "", "nvcc")
    in_home = script(tmp_path / "home" / "bin", "", "nvcc")
    chosen = script(tmp_path, "", "mine")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("FUSEWRIGHT_NVCC", raising=False)
    assert find_compiler("cuda") == (in_path,)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert find_compiler("cuda") == (in_home,)
    monkeypatch.setenv("FUSEWRIGHT_NVCC", chosen)
    assert find_compiler("cuda") == (chosen,)
    monkeypatch.setenv("CXX", f"{chosen} --flag")
    assert find_compiler("host") == (chosen, "--flag")


def test_architectures_become_flags() -> None:
    assert building._flags("cuda", "sm_80")[-1] == "arch=compute_80,code=sm_80"
    assert building._flags("cuda", "sm_90a")[-1] == "arch=compute_90a,code=sm_90a"
    with pytest.raises(BuildError, match="'volta' is not a GPU architecture"):
        building._flags("cuda", "volta")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_cuda_source_builds_and_loads_without_a_gpu(tmp_path: Path) -> None:
    text = '__global__ void k(int* x) { *x = 1; }\nextern "C" int answer() { return 7; }\n'
    made = build(Source("cuda", text, ()), cache_dir=tmp_path, arch="sm_80")
    assert load(made).answer() == 7


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path / place))
        with pytest.raises(CacheUnusable, match=r"cannot be made.*set FUSEWRIGHT_CACHE"):
            build(host(1))


def test_a_read_only_folder_still_gives_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(host(3), cache_dir=tmp_path)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    # Root may write anywhere, so the refusal is simulated at the lock, which comes first.
    monkeypatch.setattr(building.fcntl, "flock", refuse)
    assert build(host(3), cache_dir=tmp_path).cached
    with pytest.raises(CacheUnusable, match=r"cannot be written: Read-only.*FUSEWRIGHT_CACHE"):
        build(host(4), cache_dir=tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CacheUnusable, match="cannot be written: Permission denied"):
        build(host(1), cache_dir=tmp_path)
    tmp_path.chmod(0o700)


def test_a_foreign_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path.stat().st_uid + 1
    monkeypatch.setattr(building.os, "geteuid", lambda: other)
    with pytest.raises(CacheUnusable, match=r"belongs to another user.*FUSEWRIGHT_CACHE"):
        build(host(1), cache_dir=tmp_path)


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    for mode in (0o770, 0o777, 0o702):
        tmp_path.chmod(mode)
        with pytest.raises(
            CacheUnusable, match=r"written by others \(chmod 700 .*FUSEWRIGHT_CACHE"
        ):
            build(host(1), cache_dir=tmp_path)
    tmp_path.chmod(0o755)
    assert isinstance(build(host(1), cache_dir=tmp_path), Artifact)


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home-of-test")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("FUSEWRIGHT_CACHE", raising=False)
    assert building._default_folder() == Path("/home-of-test/.cache/fusewright")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert building._default_folder() == tmp_path / "fusewright"
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path / "mine"))
    assert building._default_folder() == tmp_path / "mine"
