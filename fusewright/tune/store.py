"""What tuning found, kept in one readable JSON file of the cache folder.

An entry's key is a digest of what it holds for: the kernel but for its names, the sizes, the
device and the version of this format. The file is replaced whole, by an atomic rename, under a
lock; one that cannot be read is ignored with a warning. FUSEWRIGHT_TUNED=0 leaves it alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fusewright.build import trusted_folder, writing_cache
from fusewright.cost.conv_direct import DirectSchedule
from fusewright.errors import CacheUnusable, FusewrightError
from fusewright.plan.equal_kernels import Kernel, canonical
from fusewright.schedule.choice import Schedule
from fusewright.schedule.tensor_core import (
    GradientSchedule,
    ProductSchedule,
    WindowSchedule,
)
from fusewright.target.target import Target
from fusewright.tune.candidates import Choice

VERSION = 1  # Raise it where a schedule of the same fields comes to mean another kernel.
FILE = "tuned.json"
_LOCK = "tuned.lock"
_DAMAGE = (OSError, ValueError, TypeError, KeyError, AttributeError)
_KINDS: Mapping[str, type[Choice]] = {
    "loop": Schedule,
    "product": ProductSchedule,
    "window": WindowSchedule,
    "direct": DirectSchedule,
    "gradient": GradientSchedule,
}


@dataclass(frozen=True)
class Tuned:
    """A kernel's measured choice; `heuristic` where nothing was faster beyond noise."""

    kernel: str
    device: str
    sizes: tuple[tuple[str, int], ...]
    heuristic: Choice
    schedule: Choice
    heuristic_us: float
    best_us: float
    date: str

    @property
    def changed(self) -> bool:
        return self.schedule != self.heuristic

    def differences(self) -> tuple[str, str]:
        """Before and after in words: the fields in which they differ."""
        before, after = asdict(self.heuristic), asdict(self.schedule)
        names = [name for name in before if before[name] != after.get(name)]
        texts = (", ".join(f"{name} {each[name]}" for name in names) for each in (before, after))
        left, right = texts
        return left, right


def key_of(kernel: Kernel, sizes: Mapping[str, int], device: str, target: Target) -> str:
    """The entry's name in the file."""
    text = repr((VERSION, canonical(kernel), sizes_of(kernel, sizes), device, target))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def sizes_of(kernel: Kernel, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The sizes that the kernel is called with."""
    return tuple((name, sizes[name]) for name in kernel.symbols)


def is_on() -> bool:
    """Whether choices are kept and found again."""
    text = os.environ.get("FUSEWRIGHT_TUNED", "1") or "1"
    if text not in {"0", "1"}:
        raise FusewrightError(f"FUSEWRIGHT_TUNED={text!r}: set it to 0 or 1")
    return text == "1"


def place() -> Path:
    """Where the file is; CacheUnusable where the folder cannot be trusted."""
    return trusted_folder(None) / FILE


def read() -> dict[str, Tuned]:
    """All that was kept and can still be understood."""
    if not is_on():
        return {}
    try:
        path = place()
        return _parsed(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, CacheUnusable):
        return {}  # A build in a folder that cannot be used says so itself.
    except _DAMAGE as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"{path}, the schedules found by tuning, cannot be read and is ignored ({why}); "
            "delete it, or tune again to replace it",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


def keep(found: Mapping[str, Tuned]) -> None:
    """Add these to the file."""
    if not is_on() or not found:
        return
    folder = trusted_folder(None)
    with writing_cache(folder), _locked(folder / _LOCK):
        kept = {**_readable(folder / FILE), **found}
        handle, name = tempfile.mkstemp(prefix=f"{FILE}.", dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_text(kept))
        Path(name).replace(folder / FILE)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _readable(path: Path) -> dict[str, Tuned]:
    """What is worth keeping beside new entries; `read` has warned of a file that is damaged."""
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except _DAMAGE:
        return {}


def _text(entries: Mapping[str, Tuned]) -> str:
    """JSON with a line for each field, a schedule's own fields on one."""
    choices = ",\n".join(
        f'  "{key}": {{\n{_lines(_record(each), 4)}\n  }}' for key, each in sorted(entries.items())
    )
    about = "Schedules that Fusewright measured on this machine; the file may be deleted."
    head = _lines({"about": about, "version": VERSION}, 1)
    return f'{{\n{head},\n "choices": {{\n{choices}\n }}\n}}\n'


def _lines(record: Mapping[str, object], indent: int) -> str:
    dumped = (f'"{name}": {json.dumps(v, ensure_ascii=False)}' for name, v in record.items())
    return ",\n".join(" " * indent + each for each in dumped)


def _record(entry: Tuned) -> dict[str, object]:
    kind = next(name for name, each in _KINDS.items() if isinstance(entry.schedule, each))
    return {
        "kernel": entry.kernel,
        "device": entry.device,
        "sizes": dict(entry.sizes),
        "kind": kind,
        "heuristic": asdict(entry.heuristic),
        "schedule": asdict(entry.schedule),
        "heuristic_us": round(entry.heuristic_us, 3),
        "best_us": round(entry.best_us, 3),
        "date": entry.date,
    }


def _parsed(text: str) -> dict[str, Tuned]:
    """The entries of a file; one of another version has none that count."""
    record = json.loads(text)
    if record["version"] != VERSION:
        return {}
    made = {key: _entry(each) for key, each in record["choices"].items()}
    return {key: each for key, each in made.items() if each is not None}


def _entry(record: Mapping[str, Any]) -> Tuned | None:
    kind = _KINDS[record["kind"]]
    heuristic, schedule = (_choice(kind, record[name]) for name in ("heuristic", "schedule"))
    if heuristic is None or schedule is None:
        return None
    return Tuned(
        kernel=str(record["kernel"]),
        device=str(record["device"]),
        sizes=tuple((str(name), int(size)) for name, size in record["sizes"].items()),
        heuristic=heuristic,
        schedule=schedule,
        heuristic_us=float(record["heuristic_us"]),
        best_us=float(record["best_us"]),
        date=str(record["date"]),
    )


def _choice(kind: type[Choice], values: Mapping[str, Any]) -> Choice | None:
    """A schedule of these fields; None where schedules have others by now."""
    types = {each.name: str(each.type) for each in fields(kind)}
    if set(types) != set(values):
        return None
    for name, value in values.items():
        if type(value).__name__ != types[name]:
            raise ValueError(f"{name} is {value!r}, not of type {types[name]}")
    return kind(**values)
