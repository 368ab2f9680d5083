"""Random numbers of one run, used again in another: dropout's mask in float64.

A generator draws other numbers for float64 than for float32. So the numbers of eager's run are
kept, and the float64 run gets them instead of its own, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusewright.verify.reference import Reference, scaled
from fusewright.verify.run import ask
from fusewright.verify.scenarios import Expected
from fusewright.verify.wide import WideModel


def replayed(reference: Reference, expected: Expected) -> Expected:
    """The answers of a random model with a float64 run that has eager's random numbers.

    Without such a run, the answers as they are.
    """
    question, layouts = expected.question, tuple(expected.eager)
    draws = Draws()
    try:
        with draws:
            eager = ask(reference.eager, question, layouts)
        wide = WideModel(reference.model, reference.feed.gradients)
        with draws.replaying():
            truth = wide.ask(question, layouts)
    except (RuntimeError, TypeError, ValueError):
        return expected
    return scaled(replace(expected, eager=eager.results, truth=truth, why=""))


class ReplayError(RuntimeError):
    """The second run draws other random numbers than the first."""


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what random operators return; when it is replaying, it returns that again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[tuple[str, tuple[Tensor, ...]]] = []
        self._next: Iterator[tuple[str, tuple[Tensor, ...]]] | None = None

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """A run that gets the kept numbers; ReplayError if it draws more, fewer or others."""
        self._next = iter(self._kept)
        try:
            with self:
                yield
            if next(self._next, None) is not None:
                raise ReplayError("a float64 run draws fewer random numbers")
        finally:
            self._next = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        if self._next is None:
            found = func(*args, **kwargs)
            outputs = found if isinstance(found, tuple) else (found,)
            if not all(isinstance(each, Tensor) for each in outputs):
                raise ReplayError(f"{func} cannot be replayed")
            self._kept.append((str(func), tuple(each.clone() for each in outputs)))
            return found
        return self._again(func, args, kwargs)

    def _again(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._next is not None
        name, kept = next(self._next, ("", ()))
        if name != str(func):
            raise ReplayError(f"a float64 run draws {func} and not {name or 'nothing'}")
        if func is torch.ops.aten.native_dropout.default:
            given, share = args[0], args[1]
            mask = kept[1]
            scale = 1.0 / (1.0 - share) if share < 1.0 else 0.0
            return given * mask * scale, mask.clone()
        if func._schema.is_mutable:
            return args[0].copy_(kept[0])
        if len(kept) != 1:
            raise ReplayError(f"{func} cannot be replayed")
        kind = kwargs.get("dtype") or next((e.dtype for e in args if isinstance(e, Tensor)), None)
        return kept[0].to(_wider(kept[0].dtype, kind))


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention and native_dropout draw only if they drop something."""
    if func is torch.ops.aten.native_dropout.default:
        return bool(args[2]) and args[1] > 0
    names = [each.name for each in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    return bool(args[at] if at < len(args) else kwargs.get("dropout_p", 0.0))


def _wider(kept: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Floating numbers become as wide as the run; all others stay as they are."""
    return wanted if wanted is not None and kept.is_floating_point else kept
