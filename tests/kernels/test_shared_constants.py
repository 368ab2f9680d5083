"""Numbers that Python and the kernels both know are the same in both.

A plan counts on what a kernel allocates, and a workspace is as large as the kernel's own parts.
Each such pair stands in a table here; a comment that names a kernel's constant must have its row.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import fusewright
from fusewright.cost.conv_tensor_core import group_positions, tile_positions
from fusewright.ir.convolution import ConvAxis, Geometry
from fusewright.ir.graph import Dim

PACKAGE = Path(fusewright.__file__).parent
KERNELS = PACKAGE / "kernels"
DECLARED = re.compile(r"constexpr (?:int|bool) (k[A-Z][^;]*);")
NAMED = re.compile(r"\bk[A-Z]\w+")


@dataclass(frozen=True)
class Shared:
    """A number of a Python module, and a kernel's constant with these template arguments."""

    module: str
    name: str
    header: str
    constant: str
    given: dict[str, int] = field(default_factory=dict)


ROUNDED = {"kTerms": 1}
CONSTANTS = (
    Shared("schedule.choice", "HOST_RUN", "host/loops.hpp", "kLongestRun"),
    Shared("schedule.cluster_rows", "PART_BYTES", "cuda/cluster_row.cuh", "kClusterPartBytes"),
    Shared("ir.matmul", "ROUND_PARTS", "sm90/matmul/sm90_round_operand.cuh", "kMostRoundParts"),
    Shared("cost.matmul", "TILE_COLUMNS", "sm90/matmul/sm90_tiles.cuh", "kTileColumns"),
    Shared("cost.matmul", "TILE_DEPTH", "sm90/matmul/sm90_tiles.cuh", "kTileDepth"),
    Shared("cost.matmul", "PART_BLOCKS", "sm90/matmul/sm90_split_k.cuh", "kLeastBlocks"),
    Shared(
        "cost.matmul",
        "ROUND_TILE_ROWS",
        "sm90/matmul/sm90_fp16x3_gemm.cuh",
        "kRows",
        ROUNDED | {"kTileRows": 176},
    ),
    Shared("codegen.matmul", "COUNT_BYTES", "sm90/matmul/sm90_split_k.cuh", "kCountBytes"),
    Shared(
        "codegen.matmul", "ACROSS_COLUMNS", "sm90/matmul/sm90_epilogue.cuh", "kRowPart", {"V": 1}
    ),
    Shared("cost.conv_direct", "THREADS", "convolution/direct_convolution.cuh", "kDirectThreads"),
    Shared(
        "cost.conv_direct", "SHARED_BYTES", "convolution/direct_convolution.cuh", "kDirectBytes"
    ),
    Shared("cost.conv_tensor_core", "STAGE_BYTES", "convolution/tiling.cuh", "kStageBytes"),
    Shared("cost.conv_tensor_core", "PING_PONG_BYTES", "convolution/tiling.cuh", "kPingPongBytes"),
    Shared("cost.conv_tensor_core", "MOST_RINGS", "convolution/tiling.cuh", "kMostStages"),
    Shared("cost.conv_tensor_core", "MOST_TAPS", "convolution/operands.cuh", "kMostTaps"),
    Shared("cost.conv_tensor_core", "MOST_PHASES", "convolution/operands.cuh", "kMostPhases"),
    Shared(
        "cost.conv_tensor_core",
        "MOST_POSITIONS",
        "sm90/convolution/sm90_convolution_load.cuh",
        "kTilePositions",
        ROUNDED | {"kHasPart": 0},
    ),
    Shared(
        "cost.conv_tensor_core",
        "PING_PONG_POSITIONS",
        "sm90/convolution/sm90_convolution_load.cuh",
        "kTilePositions",
        ROUNDED | {"kHasPart": 1},
    ),
    Shared(
        "cost.conv_tensor_core",
        "GRADIENT_TAPS",
        "sm90/gradient/sm90_weight_gradient_load.cuh",
        "kTapsEach",
        ROUNDED,
    ),
    Shared(
        "cost.conv_tensor_core",
        "GRADIENT_SLAB",
        "sm90/gradient/sm90_weight_gradient_load.cuh",
        "kSlabPositions",
        ROUNDED,
    ),
    Shared(
        "cost.conv_tensor_core",
        "PART_SLABS",
        "sm90/gradient/sm90_weight_gradient.cuh",
        "kPartSlabs",
    ),
    Shared(
        "cost.conv_staged",
        "STAGED_BYTES",
        "sm90/convolution/sm90_staged_convolution.cuh",
        "kStagedBytes",
    ),
    Shared(
        "cost.conv_staged",
        "RESULTS",
        "sm90/convolution/sm90_staged_convolution.cuh",
        "kBoxChannels",
    ),
    Shared(
        "cost.conv_staged",
        "BOX_ROWS",
        "sm90/convolution/sm90_staged_convolution.cuh",
        "kBoxChannels",
    ),
    Shared(
        "cost.conv_staged",
        "GRADIENT_BOX",
        "sm90/gradient/sm90_staged_weight_gradient.cuh",
        "kStagedBox",
    ),
    Shared(
        "codegen.convolution",
        "PART_POSITIONS",
        "convolution/position_reductions.cuh",
        "kPartPositions",
    ),
    Shared(
        "codegen.convolution",
        "MOST_PARTIALS",
        "convolution/position_reductions.cuh",
        "kMostPartials",
    ),
    Shared(
        "codegen.convolution",
        "FOLDED_PARTIALS",
        "convolution/position_reductions.cuh",
        "kFoldedPartials",
    ),
)
# Numbers that have no name in the kernels: the pattern finds each.
WRITTEN = (
    ("schedule.row_cache", "SHARED_ALIGN", "cuda/row.cuh", r"__align__\((\d+)\) char memory"),
    (
        "codegen.convolution",
        "WARP_CHANNELS",
        "sm90/convolution/sm90_implicit_gemm.cuh",
        r"int \w+_of_group\(int channels\) \{ return \(channels \+ \d+\) / (\d+); \}",
    ),
    (
        "codegen.convolution",
        "ROW_LANES",
        "sm90/convolution/sm90_convolution.cuh",
        r"\blay_out\(of, (\d+), ",
    ),
    (
        "cost.conv_staged",
        "LANES",
        "sm90/gradient/sm90_staged_weight_gradient.cuh",
        r"\blay_out\(\w+, (\d+), true",
    ),
    (
        "cost.conv_staged",
        "STAGED_BOX_ROWS",
        "sm90/convolution/sm90_staged_convolution.cuh",
        r"boxes = \(rows \+ \d+\) / (\d+)",
    ),
    (
        "cost.conv_tensor_core",
        "CHANNEL_BLOCK",
        "convolution/operands.cuh",
        r"channel_blocks\(\) const \{ return \(channels \+ \d+\) / (\d+); \}",
    ),
)


def python_value(module: str, name: str) -> int:
    found: int = getattr(importlib.import_module(f"fusewright.{module}"), name)
    return found


def declarations(header: str) -> list[tuple[str, str]]:
    """Names and expressions of a header's constants, in order."""
    found = []
    for text in DECLARED.findall((KERNELS / header).read_text()):
        for each in re.split(r",\s*(?=k[A-Z]\w* = )", text):
            name, _, expression = each.partition(" = ")
            found.append((name.strip(), expression.strip()))
    return found


def translated(expression: str) -> str:
    """C++'s operators as Python's; of choices, one in brackets and one around it."""
    choice = r"([^?{0}]+) \? ([^?:{0}]+) : ([^?:{0}]+)"
    python = r"(\2) if (\1) else (\3)"
    expression = re.sub(rf"\({choice.format('()')}\)", f"({python})", expression)
    expression = re.sub(f"^{choice.format('')}$", python, expression)
    expression = expression.replace("||", "or").replace("&&", "and").replace("/", "//")
    return re.sub(r"!(?!=)", "not ", expression)


def kernel_value(header: str, constant: str, given: dict[str, int]) -> int:
    """Of the first constant of that name, from those before it and the template's arguments."""
    known = {"true": 1, "false": 0}
    for name, expression in declarations(header):
        try:
            value = eval(translated(expression), {}, known | given)
        except (NameError, SyntaxError):
            continue  # of another template or header
        known[name] = given.get(name, value)
        if name == constant:
            return int(value)
    raise AssertionError(f"{header} has no {constant}")


@pytest.mark.parametrize("pair", CONSTANTS, ids=lambda pair: f"{pair.module}.{pair.name}")
def test_constants_are_the_kernels(pair: Shared) -> None:
    held = python_value(pair.module, pair.name)
    assert held == kernel_value(pair.header, pair.constant, pair.given)


@pytest.mark.parametrize(
    ("module", "name", "header", "pattern"), WRITTEN, ids=[name for _, name, _, _ in WRITTEN]
)
def test_written_numbers_are_the_kernels(module: str, name: str, header: str, pattern: str) -> None:
    found = re.findall(pattern, (KERNELS / header).read_text())
    assert found and {int(each) for each in found} == {python_value(module, name)}


@pytest.mark.parametrize("results", [64, 128])
@pytest.mark.parametrize("terms", [1, 3])
def test_tiles_are_the_kernels(terms: int, results: int) -> None:
    axis = ConvAxis(8, 8, 3, 1, 1, 1)
    of = Geometry(Dim(1), 1, 64, results, axis, axis)
    header = "sm90/convolution/sm90_convolution_load.cuh"
    given = {"kTerms": terms, "kTileChannels": results, "kPingPong": 0}
    assert tile_positions(of, terms) == kernel_value(header, "kTilePositions", given)
    assert group_positions(of, terms) == kernel_value(header, "kPositions", given)


def test_what_is_known_of_staged_images_has_its_room() -> None:
    """A scale in float32 beside the counts."""
    text = (KERNELS / "convolution/staged_input.cuh").read_text()
    counts = re.search(r"struct StagedCounts \{(.*?)\};", text, re.DOTALL)
    assert counts is not None
    fields = re.findall(r"^  uint32_t \w+;", counts[1], re.MULTILINE)
    assert python_value("cost.conv_staged", "KNOWN_BYTES") == 4 + 4 * len(fields)
    rows = python_value("cost.conv_staged", "ROW_BYTES")
    assert rows == 2 * python_value("cost.conv_tensor_core", "CHANNEL_BLOCK"), "in float16"


def test_stages_of_gradients_find_room() -> None:
    room = kernel_value("sm90/isa/sm90_launch.cuh", "kSharedBytes", {})
    assert python_value("cost.conv_staged", "GRADIENT_BYTES") < room


def test_sampling_is_launched_with_the_threads_it_is_written_for() -> None:
    text = (KERNELS / "sm90/convolution/sm90_convolution.cuh").read_text()
    patterns = (
        r"__launch_bounds__\((\d+)\)\s+sample_input\(",
        r"of_all<(\d+)>\(\w+, InputSample",
        r"sample_input<Input>;\s+launch_behind\(\w+, \w+, (\d+),",
    )
    found = [re.findall(each, text) for each in patterns]
    assert len(found[0]) == 1 and found == [found[0]] * len(patterns)


def remarks(path: Path) -> list[str]:
    """Comments and docstrings."""
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    holds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, holds)]
    return [*found, *(ast.get_docstring(node) or "" for node in nodes)]


def test_no_remark_names_a_constant_without_its_row() -> None:
    held = {pair.constant for pair in CONSTANTS} | {"kPositions"}
    for path in sorted(PACKAGE.rglob("*.py")):
        for remark in remarks(path):
            missing = set(NAMED.findall(remark)) - held
            assert not missing, f"{path.name}: {missing} is held by no row of this table"
