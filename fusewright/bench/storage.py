"""Records on disk: JSON files that are complete or absent, read back with all types checked."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from fusewright.bench.record import COLLECTION, SCHEMA, VERSION, Collection, Record
from fusewright.errors import FusewrightError

T = TypeVar("T")
_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class RecordError(FusewrightError):
    """A file is not a benchmark record, or has another version."""


def write(path: Path, value: Record | Collection) -> None:
    """Write a record as JSON, with schema and version on top."""
    schema = SCHEMA if isinstance(value, Record) else COLLECTION
    body = {"schema": schema, "version": VERSION, **_plain_fields(value)}
    write_text(path, json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write the file in one step: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    draft = Path(name)
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        draft.chmod(0o666 & ~_umask())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Raise OSError now rather than after an hour of measuring; leaves nothing behind."""
    if path.is_dir():
        raise IsADirectoryError(21, "this is a folder; name a file to write", str(path))
    nearest = path.absolute().parent
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(nearest))
    try:
        # Permissions do not tell: root ignores them, but some file systems are read-only.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        words = f"nothing can be written here ({error.strerror})"
        raise OSError(error.errno, words, str(nearest)) from error


def read(path: Path) -> Record | Collection:
    """The record or the collection in a file; RecordError if it is neither."""
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise RecordError(f"{path}: there is no such file") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecordError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(body, dict) or body.get("schema") not in (SCHEMA, COLLECTION):
        raise RecordError(f"{path}: this is not a record of `fusewright bench`")
    if body.get("version") != VERSION:
        raise RecordError(
            f"{path}: it has schema version {body.get('version')}, and this Fusewright reads "
            f"{VERSION}; run the benchmark again"
        )
    try:
        kind: type[Record | Collection] = Record if body["schema"] == SCHEMA else Collection
        return decoded(kind, body, "record")
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: {error}") from error


def read_records(path: Path) -> tuple[Record, ...]:
    """Every record in a file, or in a folder of them."""
    if path.is_dir():
        files = sorted(each for each in path.rglob("*.json") if each.name != "all.json")
        found = [each for file in files for each in read_records(file)]
        if not found:
            raise RecordError(f"{path}: this folder has no record of `fusewright bench`")
        return tuple(found)
    value = read(path)
    return (value,) if isinstance(value, Record) else value.records


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _plain_fields(value: typing.Any) -> dict[str, object]:
    return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return _plain_fields(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON has no infinity and no NaN
    return value


def decoded(kind: type[T], body: Mapping[str, object], where: str) -> T:
    """A dataclass from its plain form; absent fields keep their defaults."""
    hints = typing.get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    given = {n: _value(hints[n], body[n], f"{where}.{n}") for n in names if n in body}
    return kind(**given)


def _value(kind: typing.Any, value: typing.Any, where: str) -> object:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        wanted = next(each for each in inner if each is not types.NoneType)
        return None if value is None else _value(wanted, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {key: _value(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return decoded(typing.cast("type[object]", kind), value, where)
    if kind is float:
        value = _NUMBERS.get(value, value) if isinstance(value, str) else value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    # `type() is`, not isinstance: True is not an int here.
    elif origin is None and type(value) is kind:
        return value
    raise ValueError(f"{where} is {value!r:.40}, expected {getattr(kind, '__name__', kind)}")
