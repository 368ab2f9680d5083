"""Options that several commands have."""

from __future__ import annotations

import os
from pathlib import Path

import click

MODE_NAMES = {"train": ("train",), "eval": ("eval",), "both": ("train", "eval")}

PATH = click.Path(path_type=Path)
problem_argument = click.argument("problem", type=PATH)
device_option = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default=None,
    help="Where to run; a GPU if there is one.",
)
mode_option = click.option(
    "--mode",
    type=click.Choice(sorted(MODE_NAMES)),
    default="both",
    show_default=True,
    help="The model's mode, as train() and eval() set it.",
)
json_option = click.option("--json", "json_file", type=PATH, help="Also write a JSON record.")
check_option = click.option(
    "--check-seconds",
    "check_s",
    type=click.FloatRange(min=0.0),
    help="Seconds for the checks; what is left out then is named (optimize: 45).",
)
unconfined_option = click.option(
    "--unconfined", is_flag=True, help="Run files that you trust without namespaces of Linux."
)
seconds_option = click.option(
    "--seconds",
    type=click.FloatRange(min=1.0),
    default=300.0,
    show_default=True,
    help="All the time that a candidate may take, its build included.",
)


def _without_algebra(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        os.environ["FUSEWRIGHT_ALGEBRA"] = "0"


algebra_option = click.option(
    "--no-algebra",
    is_flag=True,
    expose_value=False,
    callback=_without_algebra,
    help="Leave out equations that hold in real arithmetic only.",
)
