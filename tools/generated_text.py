"""Shows that a refactoring changed no generated text, for a set of programs.

    python tools/generated_text.py write DIR                  # this tree's texts
    python tools/generated_text.py compare OLD_DIR NEW_DIR [--renames FILE]

`write` plans each program for a Hopper GPU, for a GPU without our tensor core kernels and for the
host, and stores the kernels' source and the emitted module of each. `compare` prints a diff and
exits with 1 where two texts differ in a byte. `--renames` names a table of old and new identifiers,
one pair a line: then code is compared token by token, without comments and line breaks, and an
identifier may have become what the table says.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fusewright.compile.call_kinds import arguments_of
from fusewright.compile.owners import owners_of
from fusewright.compile.pipeline import prepare
from fusewright.emit.bundle import ModuleBundle
from fusewright.emit.file import file_text
from fusewright.problem.load import load_problem
from fusewright.target.target import Target

LINES_OF_DIFF = 40


class Block(nn.Module):
    """Any function of one tensor, with the layers that it uses."""

    def __init__(self, run: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def transformer() -> nn.Module:
    def run(m: Block, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in m.qkv(m.first(x)).chunk(3, -1))
        seen = torch.softmax(q @ k.transpose(-1, -2) / 8.0, -1) @ v
        x = x + m.out(seen.transpose(1, 2).flatten(2))
        return x + m.down(F.gelu(m.up(m.second(x))))

    parts = {"first": nn.LayerNorm(256), "second": nn.LayerNorm(256), "qkv": nn.Linear(256, 768)}
    parts |= {"out": nn.Linear(256, 256), "up": nn.Linear(256, 1024), "down": nn.Linear(1024, 256)}
    return Block(run, **parts)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(16, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, groups=64),
        nn.GroupNorm(8, 64),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 1),
        nn.GELU(),
        nn.ConvTranspose2d(128, 32, 2, stride=2),
        nn.AdaptiveAvgPool2d(1),
    )


def matmuls(dtype: torch.dtype = torch.float32) -> nn.Module:
    def run(m: Block, x: Tensor) -> Tensor:
        x = m.down(F.silu(m.norm(m.up(x.to(dtype))))).unflatten(0, (8, -1))
        return (x @ x.transpose(1, 2)).softmax(-1) + x.amax(-1, keepdim=True)

    parts = {"up": nn.Linear(1024, 2048), "norm": nn.BatchNorm1d(2048)}
    return Block(run, **parts, down=nn.Linear(2048, 1024)).to(dtype)


def large_convolutions() -> nn.Module:
    def run(m: Block, x: Tensor) -> Tensor:
        x = F.silu(m.first(x)) + m.bias[:, None, None]
        x = torch.minimum(m.second(F.relu(m.norm(x))), x)
        return m.strided(x).mean((2, 3)) + m.thin(x).amax((2, 3))

    block = Block(
        run,
        first=nn.Conv2d(64, 128, 3, padding=1),
        norm=nn.BatchNorm2d(128),
        second=nn.Conv2d(128, 128, 3, padding=1),
        strided=nn.Conv2d(128, 256, 3, stride=2),
        thin=nn.Conv2d(128, 256, 5, groups=64),
    )
    block.bias = nn.Parameter(torch.zeros(128))
    return block


def scans() -> nn.Module:
    return Block(lambda m, x: torch.cumsum(x, 1).softmax(-1) + torch.cumprod(x, -1))


def losses() -> nn.Module:
    def run(m: Block, x: Tensor) -> Tensor:
        logits = m.layer(x)
        return F.cross_entropy(logits, logits.detach().argmax(1)) + logits.logsumexp(1).mean()

    return Block(run, layer=nn.Linear(512, 1000))


def recurrent() -> nn.Module:
    return Block(lambda m, x: m.cell(x)[0].relu(), cell=nn.LSTM(32, 64))


def layouts() -> nn.Module:
    def run(m: Block, x: Tensor) -> Tensor:
        y = F.pad(x, (1, 1, 1, 1), mode="reflect").transpose(1, 3).softmax(-1)
        return torch.cat([y, y.flip(2).tanh()], 1).amax(2)

    return Block(run)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (transformer, (4, 128, 256)),
    "convolutions": (convolutions, (8, 16, 64, 64)),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(16, 32, 3), nn.ReLU()), (4, 16, 12, 20, 20)),
    "matmuls": (matmuls, (4096, 1024)),
    "half_matmuls": (lambda: matmuls(torch.float16), (4096, 1024)),
    "large_convolutions": (large_convolutions, (64, 64, 56, 56)),
    "scans": (scans, (64, 32, 256)),
    "losses": (losses, (1024, 512)),
    "layouts": (layouts, (16, 64, 30, 34)),
    "recurrent": (recurrent, (9, 4, 32)),
}
TARGETS: dict[str, Callable[[], Target]] = {
    "hopper": Target.cuda,
    "hopper_tf32": lambda: Target.cuda(tf32=True),
    "hopper_trials": lambda: Target.cuda(
        trials=("half_matmuls", "fused_reductions"), conv_tf32=False
    ),
    "other_gpu": lambda: Target.cuda(tensor_cores=False),
    "host": Target.host,
}


def texts(name: str, model: nn.Module, args: tuple[object, ...], target: Target) -> str:
    """The emitted file, which holds the kernels' source."""
    prepared = prepare(model, args, device=torch.device("cpu"), target=target)
    modes = tuple(replace(m, owners=owners_of(model, m.program.mode)) for m in prepared.modes)
    arguments = arguments_of(model, args)
    bundle = ModuleBundle(name, target.language, prepared.source, arguments, modes)
    return file_text(bundle, "class Model:\n    pass\n", name)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Callable[[], tuple[nn.Module, tuple[object, ...]]]] = {}
    for path in sorted((ROOT / "examples").glob("*.py")):
        problem = load_problem(path)
        made[problem.name] = lambda p=problem: (p.make_model(), p.make_inputs())  # type: ignore[misc]
    for name, (make, shape) in PROGRAMS.items():
        made[name] = lambda make=make, shape=shape: (make(), (torch.randn(shape),))  # type: ignore[misc]
    for name, both in made.items():
        for which, target in TARGETS.items():
            torch.manual_seed(0)
            model, args = both()
            (folder / f"{name}.{which}.txt").write_text(texts(name, model, args, target()))
        print(name, flush=True)


CPP_STRING = re.compile(r'= r"""(.*?)"""', re.DOTALL)
CPP_COMMENT = re.compile(r"//[^\n]*")
PYTHON_COMMENT = re.compile(r"# [^\n]*|\"{3}.*?\"{3}", re.DOTALL)
HASH = re.compile(r"(?<=_)[0-9a-f]{16}(?=_)")  # of the text, comments and all, in names
TOKEN = re.compile(r"\w+|[^\w\s\\]")


def code(text: str) -> list[str]:
    """The tokens of the generated part: no comments, docstrings, line breaks or digests.

    The run time is pasted, not generated: its own tests hold it.
    """
    model, _, support = text.partition("# ---- support code")
    kernels = "".join(CPP_STRING.findall(text))
    own = model.partition("# ---- the fused kernels")[2] + support.partition("_fw_kernels = ")[2]
    kept = CPP_COMMENT.sub("", kernels) + PYTHON_COMMENT.sub("", CPP_STRING.sub("", own))
    return TOKEN.findall(HASH.sub("", kept))


def same_code(before: str, after: str, renames: set[tuple[str, str]]) -> str:
    """Where two texts differ beyond the renames, or nothing."""
    old, new = code(before), code(after)
    for at, (one, other) in enumerate(zip(old, new, strict=False)):
        if one != other and (one, other) not in renames:
            around = slice(max(0, at - 8), at + 8)
            return f"- {' '.join(old[around])}\n+ {' '.join(new[around])}"
    return "" if len(old) == len(new) else f"{len(old)} tokens, then {len(new)}"


def same_bytes(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    return "\n".join(list(lines)[:LINES_OF_DIFF])


def differences(old: Path, new: Path, renames: set[tuple[str, str]] | None) -> int:
    count = 0
    if not all(any(folder.glob("*.txt")) for folder in (old, new)):
        sys.exit(f"{old} or {new} holds no texts")
    for name in sorted({path.name for folder in (old, new) for path in folder.glob("*.txt")}):
        texts = [(f / name).read_text() if (f / name).exists() else "" for f in (old, new)]
        found = same_bytes(*texts) if renames is None else same_code(texts[0], texts[1], renames)
        if found:
            count += 1
            print(f"{name}\n{found}")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description="Generated text before and after a refactoring.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write").add_argument("folder", type=Path)
    compare = commands.add_parser("compare")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    compare.add_argument("--renames", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        write(given.folder)
        return
    renames = None
    if given.renames:
        rows = [line.split() for line in given.renames.read_text().splitlines()]
        renames = {(row[0], row[1]) for row in rows if row}
    count = differences(given.old, given.new, renames)
    print(f"{count} texts differ" if count else "all texts are equal")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
