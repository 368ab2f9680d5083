"""Random small models whose forward reads Python state, and random changes of it between calls.

A model is the text of two files: its own, and another one that it imports. It has four classes, of
which each may read some of the states: `Model`, its base, a submodule, and one of a list of
submodules. The same seed gives the same model and the same steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.support.python_modules import EFFECTS, MODULES, TENSORS
from tests.support.python_objects import OBJECTS_READ
from tests.support.python_values import VALUES, State

STATES: dict[str, State] = {**VALUES, **OBJECTS_READ, **TENSORS, **MODULES, **EFFECTS}
HEAD = """
import collections, contextvars, dataclasses, enum, fractions, functools, itertools
import math, os, random, threading, types
import numpy as np
import torch
from torch import nn
from torch import is_grad_enabled as gradients_are_wanted
"""
CLASS = """
class {cls}({base}):
{body}
    def __init__(self):
        super().__init__()
{init}
{reads}
"""
# Each class that may read states, and where the model has it.
OWNERS = {"Base": "", "Part": "part", "Item": "parts.1", "Model": ""}
# Changes of any model. `m` is the whole model; a copy takes its place.
COMMON = (
    "m.train()",
    "m.eval()",
    "m.part.eval()",
    "m.requires_grad_(False)",
    "m.weight.requires_grad_(False)",
    "m.weight = nn.Parameter(torch.full((4,), 0.75))",
    "m.weight.data.mul_(2.0)",
    "m.parts[0], m.parts[1] = m.parts[1], m.parts[0]",
    "m.part = own.Item()",
    "m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()})",
    "m = copy.deepcopy(m)",
    "m.register_forward_hook(lambda m, x, y: y * 2)",
    "m.part.register_forward_hook(lambda m, x, y: y * 2)",
    "m.weight.register_hook(lambda g: g * 2)",
    "m.unrelated = object()",
    "m.part.unrelated = 1.0",
)
# Changes that are the circumstances of later calls.
CIRCUMSTANCES = frozenset(
    "no_grad autocast float64 deterministic detached precision inference".split()
)
# In a file, globals and classes keep what they had, and functions are known by their names.
NOT_IN_A_FILE = (
    *("own.{cls}.", "own.Scale{i}.forward", "own.first", "own.second", "other.", "own.get"),
    *("own.kind", "own.times{i} =", "own.abs", "abs'"),
)
SIZES = (3, 3, 3, 2, 1, 5)


@dataclass(frozen=True)
class Read:
    """A state that a class of the model reads, with its number and its values."""

    name: str
    number: int
    values: tuple[str, ...]
    reader: str = "Model"

    def text(self, template: str, other: str = "") -> str:
        a, b, c = self.values
        where = {"cls": self.reader, "other": other}
        return template.format(i=self.number, a=a, b=b, c=c, **where)


@dataclass(frozen=True)
class Step:
    """A change, which may be none, and the calls after it: their batch size and how many.

    A change is a circumstance, or a statement over `m`, the module at `place`.
    """

    change: str = ""
    place: str = ""
    size: int = 3
    calls: int = 2


@dataclass(frozen=True)
class Case:
    """A model, how it is optimized, and what happens to it.

    The `door` is optimize, torch.compile, or a file that was saved.
    """

    seed: int
    door: str
    reads: tuple[Read, ...]
    steps: tuple[Step, ...]

    @property
    def other(self) -> str:
        return f"other_state_{self.seed}"

    @property
    def texts(self) -> tuple[str, str]:
        """Of the model's file and of the other file."""
        top = "\n".join(each.text(STATES[each.name].top, self.other) for each in self.reads)
        other = "\n".join(each.text(STATES[each.name].other) for each in self.reads)
        classes = [self._class(name) for name in OWNERS]
        return HEAD + top + "".join(classes), HEAD + other

    def _class(self, name: str) -> str:
        mine = [each for each in self.reads if each.reader == name]
        rows = [(each, STATES[each.name]) for each in mine]
        init = [each.text(row.init) for each, row in rows if row.init]
        reads = [f"factor = factor + {each.text(row.read)}" for each, row in rows]
        match name:
            case "Base":
                head, result = "def of_base(self, x):", "factor"
            case "Model":
                init[:0] = ["self.part = Part()", "self.parts = nn.ModuleList([Item(), Item()])"]
                head = "def forward(self, x):"
                reads += ["factor = factor + self.of_base(x) + self.part(x)"]
                reads += ["for each in self.parts:", "    factor = factor + each(x)"]
                result = "(x * self.weight).tanh() * factor"
            case _:
                head, result = "def forward(self, x):", "x * factor"
        if name != "Base":
            init[:0] = ["self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))"]
            result = result.replace("x * factor", "x * self.weight * factor")
        if name in ("Part", "Item") and not mine:
            result = "x * self.weight"
        lines = [f"    {line}" for line in (*reads, f"return {result}")]
        return CLASS.format(
            cls=name,
            base="Base" if name == "Model" else "nn.Module",
            body="\n".join(each.text(row.body) for each, row in rows),
            init="\n".join(f"        {line}" for line in init),
            reads="\n".join(f"    {line}" for line in (head, "    factor = 0.0", *lines)),
        )

    def without(self, read: Read) -> Case:
        return replace(self, reads=tuple(each for each in self.reads if each != read))


def drawn(seed: int) -> Case:
    """A random model with one to four states, and three to six steps."""
    rng = random.Random(seed)
    door = rng.choice(("optimize",) * 5 + ("torch.compile", "file"))
    ours = door == "file" or rng.random() < 0.5
    known = [name for name, each in STATES.items() if each.ours or not ours]
    reads = tuple(
        Read(name, at, tuple(rng.sample(("0.5", "1.5", "2.0", "3.0"), 3)), rng.choice([*OWNERS]))
        for at, name in enumerate(rng.sample(known, rng.randint(1, 4)))
    )
    case = Case(seed, door, reads, ())
    count = rng.randint(3, 6)
    steps = [Step(), *(_step(rng, case) for _ in range(count))]
    return replace(case, steps=tuple(steps))


def _step(rng: random.Random, case: Case) -> Step:
    size, calls = rng.choice(SIZES), rng.randint(1, 2)
    kind = rng.random()
    if kind < 0.08:
        return Step(rng.choice(sorted(CIRCUMSTANCES)), "", size, calls)
    changes = [
        (each.text(change, case.other), OWNERS[each.reader] if change not in CIRCUMSTANCES else "")
        for each in case.reads
        for change in STATES[each.name].changes
        if case.door != "file" or not any(word in change for word in NOT_IN_A_FILE)
    ]
    if kind < 0.3 or not changes:
        return Step(rng.choice(COMMON), "", size, calls)
    change, place = rng.choice(changes)
    return Step(change, place, size, calls)


def of_state(name: str, reader: str = "Model") -> Case:
    """A model that reads one state, with all changes of it."""
    read = Read(name, 0, ("0.5", "1.5", "3.0"), reader)
    changes = (read.text(each, "other_state_0") for each in STATES[name].changes)
    place = OWNERS[reader]
    steps = (Step(), *(Step(each, "" if each in CIRCUMSTANCES else place) for each in changes))
    return Case(0, "optimize", (read,), steps)
