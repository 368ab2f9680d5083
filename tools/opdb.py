"""`make opdb`: every operator and module of PyTorch's own databases, ours beside eager mode.

For each: its first, middle and last samples, other layouts, no rows, no dimensions, special values,
in place; with pointwise chains around it. Outputs, dtypes, shapes, strides, gradients, buffers and
which tensors get gradients are compared. Each chunk of operators runs in a process of its own, so
an abort is found and named; kernels of a chunk are compiled together. A difference that is not in
tests/opdb/known.py is a failure, and so is an abort.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TextIO

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LIMIT = 1200  # seconds for a chunk
PER_CHUNK = 40
EMULATED = "emulated"  # CUDA kernels, which g++ builds for tensors on the CPU
QUICK = "FUSEWRIGHT_OPDB_QUICK"  # tells workers that g++ need not optimize much
NO_DYNAMO = "FUSEWRIGHT_OPDB_NO_DYNAMO"  # tells them to skip what goes through torch.compile
DTYPES = "float32,float64,bfloat16,float16,int64,int32,uint8,bool"
Item = list[str]  # kind, name and dtype of an entry
Ask = Callable[[list[Item]], tuple[list[dict[str, Any]], str]]


def work(given: str, told: str, device: str, variants: str) -> None:
    """A chunk, in this process. Lines go to the file `told`."""
    import torch

    from fusewright import build
    from tests.opdb.cases import Entry
    from tests.opdb.sweep import sweep

    torch.set_num_threads(1)
    if os.environ.get(QUICK):
        build._HOST_FLAGS = [("-Og" if each == "-O3" else each) for each in build._HOST_FLAGS]
    torch.backends.cudnn.allow_tf32 = False
    own, emulated = _tensors_on(device), device == EMULATED
    with Path(told).open("w", buffering=1) as file:
        names = tuple(filter(None, variants.split(",")))
        items = [Entry(*each) for each in json.loads(Path(given).read_text())]
        told_to, by_dynamo = functools.partial(_tell, file), not os.environ.get(NO_DYNAMO)
        sweep(items, own, told_to, names, emulated=emulated, by_dynamo=by_dynamo)


def _tell(file: TextIO, line: dict[str, Any]) -> None:
    print(json.dumps(line), file=file)


def _tensors_on(device: str) -> str:
    return "cpu" if device == EMULATED else device


def judged(items: Sequence[Item], ask: Ask) -> Iterator[dict[str, Any]]:
    """The lines of a chunk. After an abort, the entries that are left go to another process. The
    compiler is shared by all: where it ends the process, each half is tried alone."""
    left = list(items)
    while left:
        lines, ended = ask(left)
        if ended and len(left) > 1 and lines and lines[-1]["step"] == "build":
            for half in (left[: len(left) // 2], left[len(left) // 2 :]):
                yield from judged(half, ask)
            return
        done = [each for each in lines if each["step"] == "done"]
        yield from done
        yield from (each for each in lines if each["step"] == "built")
        if not ended:
            return
        last = lines[-1] if lines else {"step": "start", "case": " ".join(left[0][1:])}
        yield {"step": "done", "how": "abort", **_blamed(last, ended)}
        left = _rest(left, last)


def _blamed(last: dict[str, Any], ended: str) -> dict[str, Any]:
    return {"case": last.get("case", "?"), "wrong": [f"{last['step']}: {ended}"], "comparisons": 0}


def _rest(left: list[Item], last: dict[str, Any]) -> list[Item]:
    """The entries without the one that ended the process, and without those that are done: their
    results are known only if the process came as far as comparing them."""
    blamed = last.get("case", "")
    names = [f"{name} {dtype}" for _, name, dtype in left]
    at = next((n for n, name in enumerate(names) if f"{blamed} ".startswith(f"{name} ")), 0)
    if last["step"] in ("run", "done"):
        return left[at + 1 :]
    return [each for n, each in enumerate(left) if n != at]


def _in_a_process(
    items: Sequence[Item], device: str, variants: str
) -> tuple[list[dict[str, Any]], str]:
    """The lines of a process, and how it ended if not well."""
    with tempfile.TemporaryDirectory() as folder:
        given, told = Path(folder, "given"), Path(folder, "told")
        given.write_text(json.dumps(items))
        command = [sys.executable, "-W", "ignore", __file__, "--device", device]
        command += ["--variants", variants, "--given", str(given), "--told", str(told)]
        one = {"OMP_NUM_THREADS": "1", "FUSEWRIGHT_TUNED": "0", "PYTHONPATH": _path()}
        one["CUDA_LAUNCH_BLOCKING"] = "1"  # an error is then that of the case that is running
        try:
            done = subprocess.run(
                command, env={**os.environ, **one}, capture_output=True, text=True, timeout=LIMIT
            )
            ended = "" if not done.returncode else _ending(done)
        except subprocess.TimeoutExpired:
            ended = f"not done after {LIMIT} s"
        text = told.read_text() if told.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")], ended


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"the process ended with status {done.returncode}: {last[:300]}"


def _chunks(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Neighbours are alike: each chunk has some of everything, and takes about as long."""
    count = -(-len(items) // size)
    return [list(items[at::count]) for at in range(count)]


def _unlisted(line: dict[str, Any], device: str, listed: Counter[str]) -> list[str]:
    """What nobody has given a reason for. What has one is counted in `listed`."""
    from tests.opdb.cases import entry_of
    from tests.opdb.known import reason_for

    found = []
    for words in line.get("wrong", ()):
        entry, variant = entry_of(line["case"])
        reason = reason_for(entry, variant, device, words)
        listed[reason] += bool(reason)
        found += [] if reason else [words]
    return found


@click.command()
@click.argument("names", nargs=-1)
@click.option("--device", default="cpu", help="cpu, cuda, or emulated: CUDA kernels on a CPU")
@click.option("--dtypes", default=DTYPES, help="separated by commas")
@click.option("--kinds", default="operator,module", help="operator, module or both")
@click.option("--jobs", default=os.cpu_count() or 1, help="processes at a time")
@click.option("--chunk", default=PER_CHUNK, help="operators in a process")
@click.option("--variants", default="", help="such as 'first,gaps'; all if there are none")
@click.option("--quick", is_flag=True, help="g++ optimizes little: half the time on a CPU")
@click.option("--no-dynamo", is_flag=True, help="skip cases that go through torch.compile")
@click.option("--seconds", default=0.0, help="begin no chunk that may end later; 0 for no limit")
@click.option("--json", "record", type=click.Path(path_type=Path), help="add all lines to this")
@click.option("--given", hidden=True)
@click.option("--told", hidden=True)
def main(
    names: Sequence[str],
    device: str,
    dtypes: str,
    kinds: str,
    jobs: int,
    chunk: int,
    variants: str,
    quick: bool,
    no_dynamo: bool,
    seconds: float,
    record: Path | None,
    given: str | None,
    told: str | None,
) -> None:
    """Operators and modules of PyTorch's databases, all of them or those with these NAMES."""
    if given and told:
        work(given, told, device, variants)
        return
    os.environ.update({name: "1" for name, on in ((QUICK, quick), (NO_DYNAMO, no_dynamo)) if on})
    from tests.opdb.cases import entries

    items = [
        [each.kind, each.name, each.dtype]
        for kind in kinds.split(",")
        for each in entries(kind, dtypes.split(","), _tensors_on(device))
        if not names or each.name in names
    ]
    failed = _report(items, device, _chunks(items, chunk), jobs, variants, seconds, record)
    sys.exit(1 if failed else 0)


def _report(
    items: Sequence[Item],
    device: str,
    chunks: Sequence[Sequence[Item]],
    jobs: int,
    variants: str,
    seconds: float,
    record: Path | None,
) -> int:
    """Runs all chunks and prints what differs. The number of cases with an unlisted difference."""
    left, found = 0, _Found(device, record)
    timed = _Timed(seconds)

    def lines_of(items: Sequence[Item]) -> list[dict[str, Any]] | None:
        return timed.run(lambda: [*judged(items, lambda x: _in_a_process(x, device, variants))])

    with ThreadPoolExecutor(jobs) as pool:
        for each in as_completed([pool.submit(lines_of, chunk) for chunk in chunks]):
            lines = each.result()
            left += lines is None
            found.add(lines or ())
            click.echo(f"{timed.now():.0f} s, {found.cases} cases, {found.bad} bad", err=True)
    _summary(items, found, left, timed.now())
    return found.bad + left


class _Timed:
    """Runs what is expected to end in time: it may take as long as the longest one so far."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds, self._longest = time.perf_counter(), seconds, 0.0

    def now(self) -> float:
        return time.perf_counter() - self._start

    def run(self, what: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
        begun = self.now()
        if self._seconds and begun + self._longest > self._seconds:
            return None
        made = what()
        self._longest = max(self._longest, self.now() - begun)
        return made


class _Found:
    """What came of the chunks so far. Differences are printed, and lines added to `record`."""

    def __init__(self, device: str, record: Path | None) -> None:
        self._device, self._record = device, record
        self.counts: Counter[str] = Counter()
        self.listed: Counter[str] = Counter()
        self.bad = 0

    @property
    def cases(self) -> int:
        return sum(self.counts[how] for how in HOWS)

    def add(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            self.counts["kernels"] += line.get("kernels", 0)
            if line["step"] == "done":
                self._judge(line)
            if self._record:
                with self._record.open("a") as file:
                    _tell(file, line)

    def _judge(self, line: dict[str, Any]) -> None:
        self.counts[line["how"]] += 1
        self.counts["comparisons"] += line.get("comparisons", 0)
        wrong = _unlisted(line, self._device, self.listed)
        self.bad += bool(wrong)
        for words in wrong:
            print(f"{line['case']} ({line['how']}): {words}", flush=True)


HOWS = ("fused", "dynamo", "original", "refused", "skipped", "abort", "")


def _summary(items: Sequence[Item], found: _Found, left: int, seconds: float) -> None:
    import torch

    counts = found.counts
    kinds = Counter(kind for kind, _, _ in {(kind, name, "") for kind, name, _ in items})
    what = ", ".join(f"{count} {kind}s" for kind, count in sorted(kinds.items()))
    print(f"\nPyTorch {torch.__version__}: {what}, {len(items)} with dtypes; {seconds:.0f} s")
    print(f"{found.cases} cases, {counts['comparisons']} comparisons, {counts['kernels']} kernels")
    print(", ".join(f"{how or 'not optimized'}: {counts[how]}" for how in HOWS if counts[how]))
    for reason, count in found.listed.most_common():
        print(f"{count} listed differences: {reason}") if reason else None
    ending = f"; {left} chunks left out" if left else ""
    print(f"{found.bad} cases with unlisted differences{ending}")


if __name__ == "__main__":
    main()
