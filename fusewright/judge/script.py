"""The calls that a candidate must answer: a table of kinds, in a secret order and number.

A candidate cannot tell the kinds apart before it sees the values, and all answers are checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusewright.judge.copies import COPIES
from fusewright.problem.inputs import LAYOUTS, SPACED, is_overlapping, laid_out, with_nan
from fusewright.problem.nested import leaves

# Where the inputs lie: in new memory; at the address of earlier ones, as new tensors; or in the
# very tensors of an earlier call, with other values.
PLACES = ("fresh", "again", "same")
HOW = ("grad", "backward")
# Two backwards through the same graph, whose gradients add up.
ADDED_UP = "added up"
ASIDE = "another current stream"
# Stands for a submodule that is chosen when the call is made.
ANY_PART = "*"
# Halves of all inputs and weights, so that of two each once has a gradient without the other.
SPLITS = 6
_OTHER_STREAM = (
    "ignores the current stream: launch kernels on `at::cuda::getCurrentCUDAStream()`, "
    "or they run before their inputs are there"
)
_OTHER_MODE = (
    "ignores the mode of a part: a frozen batch norm is in eval mode while the model trains; ask "
    "each module's own `training`"
)
_NO_DENORMALS = "takes numbers below 1e-38 for zero, as compilers do it under -use_fast_math"
_OTHER_KINKS = (
    "has other gradients than the model where inputs are zero: ReLU has none at zero, and of equal "
    "elements PyTorch's max pooling takes the first"
)
_SLOTS = 2
_FEWEST_MORE, _MOST_MORE = 10, 24
_FEWEST_MANY, _MOST_MANY = 80, 160
_SETS = (1, 1, 1, 2, 3)
_MOSTLY_NEW = ("",) * 6
_SCALE = 200.0
_SPOILED = 3
_LEAK_CALLS = 12
_KEPT, _BELOW = 0.9, 0.01

Alter = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """One request: a call, several, or two forwards and then two backwards (`twice`).

    `alter` changes every floating input, `rows` asks for fewer or more rows, `strided` for inputs
    in that layout, and `numbers` for other numbers among the arguments. `follows` names how the
    inputs follow from those of an earlier call. `sets` calls follow one another in one request.
    `new_weights` takes an optimizer step first, or loads a state if `loaded`, and `copied` goes on
    with a copy of the model, one of `COPIES`. If the candidate refuses a step with `may_refuse`,
    that is noted and no failure. A `traced` step tells which operators of PyTorch run, and a
    `weighed` one how much memory they take. In a `frozen` step no weight requires a gradient, in a
    `split` one half of the inputs and weights, the one of this number; `fixed` are their names. In
    a `partial` one some outputs get none. `odd` inputs begin at odd addresses. In a step that is
    `aside` another stream of a GPU is the current one. `part` is a submodule in the other mode. A
    wrong result of a `lenient` step is no failure but a flag, with these words.
    """

    name: str = ""
    mode: str = "train"
    gradients: bool = False
    input_gradients: bool = True
    alter: Alter | None = None
    follows: str = ""
    rows: str = ""
    strided: str = ""
    numbers: bool = False
    twice: bool = False
    new_weights: bool = False
    loaded: bool = False
    copied: str = ""
    may_refuse: bool = False
    layout: str = LAYOUTS[0]
    place: str = PLACES[0]
    slot: int = 0
    sets: int = 1
    traced: bool = False
    weighed: bool = False
    frozen: bool = False
    split: int = 0
    fixed: tuple[str, ...] = ()
    partial: bool = False
    odd: bool = False
    aside: bool = False
    part: str = ""
    lenient: str = ""
    how: str = HOW[0]

    @property
    def asks_input_gradients(self) -> bool:
        return self.gradients and self.input_gradients

    @property
    def label(self) -> str:
        """The step in words: eval without gradients, ×200."""
        gradients = "with gradients" if self.gradients else "without gradients"
        return ", ".join(filter(None, (f"{self.mode} {gradients}", self.name)))


def scaled(leaf: Tensor) -> Tensor:
    return leaf * _SCALE


def shifted(leaf: Tensor) -> Tensor:
    """All values moved by several times their spread, up or down."""
    spread = float(leaf.std()) if leaf.numel() > 1 else 1.0
    way = 1.0 if float(torch.rand(())) < 0.5 else -1.0
    return leaf + way * (3.0 + 5.0 * float(torch.rand(()))) * max(spread, 0.1)


def small(leaf: Tensor) -> Tensor:
    """All values near zero, by a random power of ten."""
    size: float = 10.0 ** -(1.0 + 3.0 * float(torch.rand(())))
    return leaf * size


def scaled_by_rows(leaf: Tensor) -> Tensor:
    """Each row has a size of its own, from a hundredth to a hundred times the usual one."""
    if not leaf.dim():
        return leaf
    rows = [leaf.shape[0]] + [1] * (leaf.dim() - 1)
    sizes: Tensor = 10.0 ** (4.0 * torch.rand(rows).to(leaf) - 2.0)
    return leaf * sizes


def of_one_sign(leaf: Tensor) -> Tensor:
    return leaf.abs() if float(torch.rand(())) < 0.5 else -leaf.abs()


def unchanged(leaf: Tensor) -> Tensor:
    return leaf


def with_one_other_element(leaf: Tensor) -> Tensor:
    """One element moves by more than the usual size of all."""
    if not leaf.numel() or not leaf.is_floating_point():
        return leaf
    flat = leaf.detach().flatten().clone()
    size = float(flat.abs().mean()) + 0.1
    flat[int(torch.randint(leaf.numel(), ()))] += (2.0 + float(torch.rand(()))) * size
    return flat.view(leaf.shape)


def in_another_order(leaf: Tensor) -> Tensor:
    """The same rows, each at another place."""
    rows = leaf.shape[0] if leaf.dim() else 1
    return leaf.roll(int(torch.randint(1, rows, ())), 0) if rows > 1 else leaf


# Inputs that follow from those of an earlier call: what a cache may take for the same.
FOLLOWS: dict[str, Alter] = {
    "the same values again": unchanged,
    "one other element": with_one_other_element,
    "the same rows in another order": in_another_order,
}


def with_zeros(leaf: Tensor) -> Tensor:
    """A row, and some elements of others, are zero."""
    if not leaf.numel():
        return leaf
    kept = torch.rand(leaf.shape, device=leaf.device) < _KEPT
    if leaf.dim() > 1:
        kept[int(torch.randint(leaf.shape[0], ()))] = False
    return leaf * kept


def denormal(leaf: Tensor) -> Tensor:
    """All values are smaller than a float's exponent can say."""
    least = torch.finfo(leaf.dtype).tiny
    return leaf.clamp(-1.0, 1.0) * (_BELOW * least)


def with_infinities(leaf: Tensor) -> Tensor:
    """Both infinities in up to three elements each."""
    if not leaf.numel():
        return leaf
    flat = leaf.detach().flatten().clone()
    for value in (torch.inf, -torch.inf):
        flat[torch.randint(leaf.numel(), (_SPOILED,))] = value
    return flat.view(leaf.shape)


def with_nans(leaf: Tensor) -> Tensor:
    spoiled = with_nan(leaf)
    assert isinstance(spoiled, Tensor)
    return spoiled


def strided(leaf: Tensor, layout: str) -> Tensor:
    """The same values in memory that is not contiguous."""
    if is_overlapping(leaf):
        return leaf
    if layout != SPACED and leaf.dim() > 2 and float(torch.rand(())) < 0.5:
        return leaf.detach().movedim(1, -1).contiguous().movedim(-1, 1)  # channels last
    return laid_out(leaf.detach(), layout if leaf.dim() > 1 else "sliced")


def another_number(leaf: float) -> float:
    """The other truth value, or a smaller number; a range such as [0, 1] holds."""
    if isinstance(leaf, bool):
        return leaf is (float(torch.rand(())) < 0.5)
    return leaf * (1.0 - 0.5 * float(torch.rand(())))


def has_numbers(inputs: tuple[object, ...]) -> bool:
    """Whether there are arguments for which another number may stand."""
    found = (leaf for each in inputs for _, leaf in leaves("x", each))
    return any(isinstance(leaf, float | bool) for leaf in found)


def altered(step: Step, leaf: object) -> object:
    """An argument, or a part of it, as a step wants it."""
    if not isinstance(leaf, Tensor):
        other = step.numbers and isinstance(leaf, float | bool)
        return another_number(leaf) if other else leaf  # type: ignore[arg-type]
    if step.alter is not None and leaf.is_floating_point():
        return step.alter(leaf)
    return strided(leaf, step.strided) if step.strided else leaf


_BOTH = ("train", "eval")
_AGAIN = "the same values again"
_TABLE = (
    *(Step(mode=mode, gradients=each) for mode in _BOTH for each in (True, False)),
    *(Step("the same addresses", mode=mode, place=p) for mode in _BOTH for p in PLACES[1:]),
    *(Step("the same addresses", mode="train", gradients=True, place=p) for p in PLACES[1:]),
    *(Step("new weights", mode=mode, gradients=True, new_weights=True) for mode in _BOTH),
    *(Step("new weights", mode=mode, new_weights=True) for mode in _BOTH),
    *(Step(f"{e} gradient", gradients=True, layout=e) for e in (*LAYOUTS[1:], SPACED)),
    Step("a deep copy", gradients=True, new_weights=True, copied="deepcopy"),
    *(Step(words, "eval", new_weights=True, copied=how) for how, words in COPIES.items()),
    *(Step("loaded weights", mode=mode, new_weights=True, loaded=True) for mode in _BOTH),
    Step("inputs need no gradient", gradients=True, input_gradients=False),
    *(Step("weights need no gradient", mode=m, gradients=True, frozen=True) for m in _BOTH),
    *(Step("some gradients only", gradients=True, split=each) for each in range(1, SPLITS + 1)),
    *(Step("gradients of some outputs only", gradients=True, partial=True) for _ in range(2)),
    *(Step("inputs at odd addresses", mode=m, odd=True, may_refuse=True) for m in _BOTH),
    Step("two forwards, then two backwards", gradients=True, twice=True),
    Step("gradients added up", gradients=True, how=ADDED_UP, may_refuse=True),
    *(Step(name, mode=mode, follows=name) for name in FOLLOWS for mode in _BOTH),
    *(Step(name, gradients=True, follows=name) for name in FOLLOWS),
    *(Step(_AGAIN, mode=mode, follows=_AGAIN, new_weights=True) for mode in _BOTH),
    *(Step(f"{r} rows", mode=m, rows=r, may_refuse=True) for r in ("fewer", "more") for m in _BOTH),
    *(Step("one row", mode=mode, rows="one", may_refuse=True) for mode in _BOTH),
    Step("fewer rows", gradients=True, rows="fewer", may_refuse=True),
    Step("more rows", gradients=True, rows="more", may_refuse=True),
    Step("one row", gradients=True, rows="one", may_refuse=True),
    *(Step("other numbers", mode=m, numbers=True, may_refuse=True) for m in (*_BOTH, *_BOTH)),
    *(Step("inputs × 200", mode=mode, alter=scaled) for mode in _BOTH),
    Step("inputs × 200", gradients=True, alter=scaled),
    *(Step("shifted inputs", mode=mode, alter=shifted) for mode in _BOTH),
    *(Step("small inputs", mode=mode, alter=small) for mode in _BOTH),
    *(Step("rows of many sizes", mode=mode, alter=scaled_by_rows) for mode in _BOTH),
    Step("rows of many sizes", gradients=True, alter=scaled_by_rows),
    Step("inputs of one sign", mode="eval", alter=of_one_sign),
    *(Step("zeros in the inputs", mode=mode, alter=with_zeros) for mode in _BOTH),
    Step("zeros in the inputs", gradients=True, alter=with_zeros, lenient=_OTHER_KINKS),
    Step("denormal inputs", mode="eval", alter=denormal, lenient=_NO_DENORMALS),
    *(
        Step("a part in another mode", m, gradients, part=ANY_PART, lenient=_OTHER_MODE)
        for m in _BOTH
        for gradients in (True, False)
    ),
    *(Step("NaN in the inputs", mode=mode, alter=with_nans) for mode in _BOTH),
    *(Step("infinities in the inputs", mode=mode, alter=with_infinities) for mode in _BOTH),
    *(
        Step("inputs not contiguous", mode, gradients, strided=layout, may_refuse=True)
        for layout in ("transposed", SPACED)
        for mode, gradients in (("train", False), ("eval", False), ("train", True))
    ),
)


# These come last: memory that a module takes in inference mode is of no use outside.
_LAST = tuple(Step("inference mode", mode=mode, how="inference") for mode in _BOTH)


def script(chance: random.Random, modes: Sequence[str] = _BOTH) -> list[Step]:
    """All kinds of calls, and a random number of plain ones among them, in random order.

    The first two are plain: what fails there is wrong for everyone.
    """
    count = chance.randint(_FEWEST_MORE, _MOST_MORE)
    plain = [Step(gradients=chance.random() < 0.5, mode=chance.choice(_BOTH)) for _ in range(count)]
    first = [Step(gradients=True), Step(mode="eval")]
    rest = [_varied(each, chance) for each in (*_TABLE, *plain)]
    chance.shuffle(rest)
    steps = [each for step in rest for each in (*_what_it_follows(step), step)]
    return [each for each in (*first, *steps) if each.mode in modes]


def _what_it_follows(step: Step) -> list[Step]:
    """A plain call, of which a file may keep the result for the inputs that follow from it."""
    return [Step(mode=step.mode, gradients=step.gradients)] if step.follows else []


def many_more(chance: random.Random, modes: Sequence[str]) -> list[Step]:
    """Plain calls for candidates that count: as many as the time allows are asked."""
    count = chance.randint(_FEWEST_MANY, _MOST_MANY)
    steps = [
        Step(
            mode=chance.choice(tuple(modes)),
            sets=chance.choice(_SETS),
            follows=chance.choice((*_MOSTLY_NEW, *FOLLOWS)),
        )
        for _ in range(count)
    ]
    return [_varied(each, chance) for each in steps]


def last_steps(modes: Sequence[str]) -> list[Step]:
    """Which operators run, how much memory a call takes, other streams, and inference mode.

    A weighed call repeats the one before, at its addresses, so that only its own memory is new.
    """
    (mode,) = tuple(modes)[-1:]
    weighed = [
        Step(mode=mode, gradients=gradients, place=place, weighed=place == PLACES[1])
        for gradients in (False, True)
        for place in PLACES[:2]
    ]
    traced = Step(mode=mode, traced=True)
    how: dict[str, Any] = {"aside": True, "may_refuse": True, "lenient": _OTHER_STREAM}
    aside = [Step(ASIDE, mode, gradients, **how) for gradients in (False, True)]
    return [traced, *weighed, *aside, *(each for each in _LAST if each.mode in modes)]


def leak_steps(modes: Sequence[str]) -> list[Step]:
    """Plain calls, and then one more that is weighed: what is held before it was left behind."""
    (mode,) = tuple(modes)[-1:]
    last = Step(mode=mode, place=PLACES[1], weighed=True)
    return [*(Step(mode=mode) for _ in range(_LEAK_CALLS)), last]


def _varied(step: Step, chance: random.Random) -> Step:
    """With a random place, slot and way to ask for gradients, where the step leaves it open."""
    place = step.place if step.place != PLACES[0] else chance.choice(PLACES)
    how = chance.choice(HOW) if step.how in HOW else step.how
    chosen = replace(step, slot=chance.randrange(_SLOTS), how=how)
    return replace(chosen, place="fresh" if step.rows or step.twice or step.odd else place)
