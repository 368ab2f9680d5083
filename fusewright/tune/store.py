"""The results of tuning, in one readable JSON file of the cache folder.

An entry's key is a digest of the kernel without its names, the sizes, the device and the version of
this format. The file is replaced as a whole, by an atomic rename, under a lock. A file that cannot
be read is ignored with a warning. With FUSEWRIGHT_TUNED=0 the file is not used.
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
from fusewright.errors import CacheUnusable, FusewrightError
from fusewright.ir.graph import Sizes
from fusewright.ir.kernel import Kernel
from fusewright.kinds.kind import Choice
from fusewright.kinds.registry import stored_name, stored_type
from fusewright.target.target import Target

VERSION = 2  # Raise it if a schedule with the same fields gets another meaning.
FILE = "tuned.json"
_LOCK = "tuned.lock"
_DAMAGE = (OSError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class Tuned:
    """A kernel's fastest schedule: the `heuristic` one unless another was faster beyond noise."""

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
        """The fields in which both schedules differ, as text: the heuristic's, the fastest's."""
        before, after = asdict(self.heuristic), asdict(self.schedule)
        names = [name for name in before if before[name] != after.get(name)]
        left, right = ([f"{name} {each[name]}" for name in names] for each in (before, after))
        return ", ".join(left), ", ".join(right)


def key_of(kernel: Kernel, sizes: Sizes, device: str, target: Target) -> str:
    """The entry's key in the file."""
    text = repr((VERSION, kernel.canonical(), sizes_of(kernel, sizes), device, target))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def sizes_of(kernel: Kernel, sizes: Sizes) -> tuple[tuple[str, int], ...]:
    """The sizes with which the kernel is called."""
    return tuple((name, sizes[name]) for name in kernel.symbols)


def is_on() -> bool:
    """Whether the file is used."""
    text = os.environ.get("FUSEWRIGHT_TUNED", "1") or "1"
    if text not in {"0", "1"}:
        raise FusewrightError(f"FUSEWRIGHT_TUNED={text!r}: set it to 0 or 1")
    return text == "1"


def read() -> dict[str, Tuned]:
    """All entries that can be read."""
    if not is_on():
        return {}
    try:
        path = trusted_folder(None) / FILE
        return _parsed(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, CacheUnusable):
        return {}  # If the folder cannot be used, the next build says so.
    except _DAMAGE as error:
        text = f"{path}, the schedules found by tuning, cannot be read and is ignored "
        text += f"({type(error).__name__}: {error}); delete it, or tune again to replace it"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return {}


def keep(found: Mapping[str, Tuned]) -> None:
    """Add these entries to the file."""
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
    """The entries of a file; none if it is damaged, of which `read` has warned."""
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except _DAMAGE:
        return {}


def _text(entries: Mapping[str, Tuned]) -> str:
    """JSON with a line for each field; a schedule is one line."""
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
    rounded = {name: round(getattr(entry, name), 3) for name in ("heuristic_us", "best_us")}
    kind = stored_name(entry.schedule)
    return {"kind": kind, **asdict(entry), "sizes": dict(entry.sizes), **rounded}


def _parsed(text: str) -> dict[str, Tuned]:
    """The entries of a file. A file of another version has none."""
    record = json.loads(text)
    if record["version"] != VERSION:
        return {}
    made = {key: _entry(each) for key, each in record["choices"].items()}
    return {key: each for key, each in made.items() if each is not None}


def _entry(record: Mapping[str, Any]) -> Tuned | None:
    kind = stored_type(record["kind"])
    if kind is None:
        return None  # another version's
    choices = {name: _choice(kind, record[name]) for name in ("heuristic", "schedule")}
    if None in choices.values():
        return None
    sizes = tuple((str(name), int(size)) for name, size in record["sizes"].items())
    times = {name: float(record[name]) for name in ("heuristic_us", "best_us")}
    texts = {name: str(record[name]) for name in ("kernel", "device", "date")}
    return Tuned(**texts, **times, **choices, sizes=sizes)  # type: ignore[arg-type]


def _choice(kind: type[Any], values: Mapping[str, Any]) -> Choice | None:
    """A schedule with these fields. None if schedules have other fields now."""
    types = {each.name: str(each.type) for each in fields(kind)}
    if set(types) != set(values):
        return None
    for name, value in values.items():
        if type(value).__name__ != types[name]:
            raise ValueError(f"{name} is {value!r}, but must be of type {types[name]}")
    made: Choice = kind(**values)
    return made
