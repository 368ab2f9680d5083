"""Levels on stderr and numbered dumps."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fusewright import debug
from fusewright.errors import FusewrightError


@pytest.mark.parametrize(("level", "heard"), [("0", ""), ("1", "a"), ("2", "ab"), ("3", "abc")])
def test_level_chooses_what_is_said(
    level: str,
    heard: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_DEBUG", level)
    monkeypatch.setattr(debug._LOGGER, "handlers", [])
    for at, word in enumerate("abc", start=1):
        debug.log(at, "%s", word)
    captured = capsys.readouterr()
    assert captured.err == "".join(f"fusewright: {word}\n" for word in heard)
    assert captured.out == ""


def test_a_warning_is_heard_at_every_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(debug._LOGGER, "handlers", [])
    monkeypatch.setattr(debug._LOGGER, "propagate", False)  # pytest listens at the root
    debug.tell("%s changed", "it")
    debug.tell("again")
    assert capsys.readouterr().err == "fusewright: it changed\nfusewright: again\n"


def test_the_users_own_handlers_get_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(debug._LOGGER, "handlers", [])
    monkeypatch.setattr(debug._LOGGER, "propagate", True)
    debug.tell("%s changed", "it")
    assert caplog.messages == ["it changed"] and capsys.readouterr().err == ""


def test_a_wrong_level_names_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_DEBUG", "loud")
    with pytest.raises(FusewrightError, match="FUSEWRIGHT_DEBUG='loud': set it to 0, 1, 2 or 3"):
        debug.log(1, "hello")


def test_dumps_are_numbered_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_DUMP", str(tmp_path / "new"))
    monkeypatch.setattr(debug, "_numbers", itertools.count())
    debug.dump("capture", "graph\n")
    debug.dump("source forward/train", "int x;\n", ".cu")
    written = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert written == {"00_capture.txt": "graph\n", "01_source_forward_train.cu": "int x;\n"}


def test_no_dump_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert debug.dump("capture", "graph") is None
    assert list(tmp_path.iterdir()) == []


def test_a_dump_that_cannot_be_written_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEWRIGHT_DUMP", str(tmp_path / "file"))
    with pytest.raises(FusewrightError, match=r"FUSEWRIGHT_DUMP=.*choose another folder"):
        debug.dump("capture", "graph")
