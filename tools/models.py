"""`make models`: real models of torchvision, timm and transformers, each in a process of its own.

For each: whether outputs and all gradients of a training step are right, in float32 and under
bfloat16 autocast; graphs, graph breaks (of torch.compile with another back-end, too), PyTorch calls
that are left; and the seconds of the first step, from nothing, beside Inductor's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LIMIT = 900  # seconds for a model
COLUMNS = (
    "model", "float32", "bfloat16", "error", "eager's", "graphs", "breaks", "Inductor's",
    "calls left", "seconds", "Inductor's",
)  # fmt: skip


_TRIES = 3


def judged(name: str, inductor: bool, device: str) -> dict[str, Any]:
    """All facts about one model. Runs in a process of its own."""
    import torch

    from tests.models import zoo
    from tests.models.step import by_inductor, compared

    with suppress(ImportError):  # before transformers, which imports torchvision if it is there
        zoo.packages(("torchvision",))
    made: dict[str, Any] = {"model": name}
    for word, autocast in (("float32", False), ("bfloat16", True)):
        # An input of ReLU may be so near to zero that rounding decides. With other values another
        # one is, or none; a real error stays.
        for seed in range(_TRIES):
            torch.manual_seed(seed)
            torch._dynamo.reset()
            found = compared(zoo.ZOO[name]().on(device), autocast)
            if not found.wrong:
                break
        made[word] = "right" if not found.wrong else "wrong"
        if not autocast:
            made |= {"error": found.ours, "eager's": found.eager, **found.facts}
        made.setdefault("wrong", {}).update({f"{word}: {n}": e for n, e in found.wrong.items()})
    if inductor:
        made["Inductor"] = by_inductor(zoo.ZOO[name]().on(device))
    return made


def _in_a_process(name: str, inductor: bool, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        caches = {"FUSEWRIGHT_CACHE": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        command = [sys.executable, "-W", "ignore", __file__, "--one", name, "--device", device]
        command += [] if inductor else ["--no-inductor"]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **caches},
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            return {"model": name, "failed": f"not done after {LIMIT} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"model": name, "failed": last, "took": time.perf_counter() - start}
    made: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return made


def _row(facts: dict[str, Any]) -> list[str]:
    if "failed" in facts:
        return [facts["model"], "failed", str(facts["failed"])[:60]]
    row = [facts["model"], facts["float32"], facts["bfloat16"]]
    row += [f"{facts[name]:.1e}" for name in ("error", "eager's")]
    others = facts.get("Inductor", {"breaks": "", "seconds": 0.0})
    row += [str(facts["graphs"]), str(facts["breaks"]), str(others["breaks"])]
    return [*row, str(facts["calls left"]), *(f"{s['seconds']:.1f}" for s in (facts, others))]


@click.command()
@click.argument("names", nargs=-1)
@click.option("--one", help="Judge one model in this process and print the facts as JSON.")
@click.option("--inductor/--no-inductor", default=True, help="Time Inductor's first step as well.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]), help="Where to run.")
@click.option("--jobs", default=1, help="How many models to run at once.")
@click.option("--json", "record", type=click.Path(path_type=Path), help="Write all facts here.")
def main(
    names: Sequence[str],
    one: str | None,
    inductor: bool,
    device: str,
    jobs: int,
    record: Path | None,
) -> None:
    """Real models against float64, all of them or those with these NAMES."""
    if one:
        print(json.dumps(judged(one, inductor, device)))
        return
    from tests.models.zoo import ZOO

    table, facts = Table(*COLUMNS), []
    with ThreadPoolExecutor(jobs) as pool:
        for each in pool.map(lambda name: _in_a_process(name, inductor, device), names or ZOO):
            facts.append(each)
            click.echo("  ".join(_row(each)), err=True)
            table.add_row(*_row(each))
    Console(width=140).print(table)
    if record:
        record.write_text(json.dumps(facts, indent=1) + "\n")
    bad = [each for each in facts if each.get("float32") != "right" or each["bfloat16"] != "right"]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
