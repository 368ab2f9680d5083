"""What the text of a file names that no kernel needs; what kernels do need is not named."""

from __future__ import annotations

from pathlib import Path

from fusewright.judge.tripwires import tripwires
from tests.judge.all_candidates import FOLDER

TEXT = """
import gc as collector
import sys
import torch
from inspect import stack as frames
from torch import nn

nn.Linear.forward = lambda self, x: x
LINES = frames()
FRAME = sys._getframe(1)
FRAMES = sys._getframe(2)
sys.addaudithook(print)
ALL = collector.get_objects()
gc = 1
"""


def test_suspicious_names_are_found_under_any_alias(tmp_path: Path) -> None:
    path = tmp_path / "new.py"
    path.write_text(TEXT)
    found = tripwires(path)
    assert sorted(each.split(":")[0] for each in found) == [
        "the text names gc.get_objects, line 13",
        "the text names inspect.stack, line 9",
        "the text names sys._getframe, line 10",
        "the text names sys.addaudithook, line 12",
        "the text names torch.nn.Linear.forward, line 8",
    ]


def test_texts_that_are_no_python_name_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new.py"
    for text in ("def (", "x = 1\0"):
        path.write_text(text)
        assert tripwires(path) == ()


def test_kernels_of_every_style_are_no_reason_to_suspect() -> None:
    for name in ("compiled_c", "load_inline", "custom_operator", "triton_kernel", "cuda_kernel"):
        assert tripwires(FOLDER / f"{name}.py") == (), name


def test_no_text_stops_the_judge(tmp_path: Path) -> None:
    path = tmp_path / "new.py"
    path.write_text("import sys\nsys._getframe()\ny = x" + ".a" * 1500 + "\n")
    assert tripwires(path) == ("the text names sys._getframe, line 2: it looks into its callers",)
    path.write_text("x = " + "-" * 9000 + "1\n")
    assert tripwires(path) == ()
    assert tripwires(tmp_path / "none.py") == ()
