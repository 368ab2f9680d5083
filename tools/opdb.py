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
from collections.abc import Callable, Iterator, Sequence
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
        told_to = functools.partial(_tell, file)
        sweep(items, own, told_to, names, emulated=emulated)


def _tell(file: TextIO, line: dict[str, Any]) -> None:
    print(json.dumps(line), file=file)


def _tensors_on(device: str) -> str:
    return "cpu" if device == EMULATED else device


def judged(items: Sequence[Item], ask: Ask) -> Iterator[dict[str, Any]]:
    """The lines of a chunk. After an abort, the entries that are left go to another process."""
    left = list(items)
    while left:
        lines, ended = ask(left)
        done = [each for each in lines if each["step"] == "done"]
        yield from done
        yield from (each for each in lines if each["step"] == "built")
        if not ended:
            return
        last = lines[-1] if lines else {"step": "start", "case": " ".join(left[0])}
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
@click.option("--seconds", default=0.0, help="begin no chunk after this time; 0 for no limit")
@click.option("--json", "record", type=click.Path(path_type=Path), help="write all lines here")
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
    seconds: float,
    record: Path | None,
    given: str | None,
    told: str | None,
) -> None:
    """Operators and modules of PyTorch's databases, all of them or those with these NAMES."""
    if given and told:
        work(given, told, device, variants)
        return
    os.environ.update({QUICK: "1"} if quick else {})
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
    start, left, bad = time.perf_counter(), 0, 0
    counts: Counter[str] = Counter()
    listed: Counter[str] = Counter()
    lines: list[dict[str, Any]] = []

    def lines_of(items: Sequence[Item]) -> list[dict[str, Any]] | None:
        late = seconds and time.perf_counter() - start > seconds
        return None if late else list(judged(items, lambda x: _in_a_process(x, device, variants)))

    with ThreadPoolExecutor(jobs) as pool:
        for each in as_completed([pool.submit(lines_of, chunk) for chunk in chunks]):
            found = each.result()
            left += found is None
            for line in found or ():
                lines.append(line)
                counts["kernels"] += line.get("kernels", 0)
                if line["step"] != "done":
                    continue
                counts[line["how"]] += 1
                counts["comparisons"] += line.get("comparisons", 0)
                wrong = _unlisted(line, device, listed)
                bad += bool(wrong)
                for words in wrong:
                    print(f"{line['case']} ({line['how']}): {words}", flush=True)
            took = time.perf_counter() - start
            click.echo(f"{took:.0f} s, {sum(counts[w] for w in HOWS)} cases, {bad} bad", err=True)
    if record:
        record.write_text("\n".join(json.dumps(each) for each in lines) + "\n")
    _summary(items, counts, listed, bad, left, time.perf_counter() - start)
    return bad + left


HOWS = ("fused", "dynamo", "original", "refused", "abort", "")


def _summary(
    items: Sequence[Item],
    counts: Counter[str],
    listed: Counter[str],
    bad: int,
    left: int,
    seconds: float,
) -> None:
    import torch

    kinds = Counter(kind for kind, _, _ in {(kind, name, "") for kind, name, _ in items})
    what = ", ".join(f"{count} {kind}s" for kind, count in sorted(kinds.items()))
    print(f"\nPyTorch {torch.__version__}: {what}, {len(items)} with dtypes; {seconds:.0f} s")
    print(f"{sum(counts[how] for how in HOWS)} cases, {counts['comparisons']} comparisons, "
          f"{counts['kernels']} kernels")  # fmt: skip
    print(", ".join(f"{how or 'not optimized'}: {counts[how]}" for how in HOWS if counts[how]))
    for reason, count in listed.most_common():
        print(f"{count} listed differences: {reason}") if reason else None
    print(f"{bad} cases with unlisted differences" + (f"; {left} chunks left out" if left else ""))


if __name__ == "__main__":
    main()
