"""What matmuls and convolutions have in common: an epilogue, which is a loop over their result.

One load of that loop, the `accumulator`, reads no memory: the kernel passes each element to it from
registers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Self

from fusewright.ir.graph import ITEM_BYTES, ONE, Dim
from fusewright.ir.loop import Argument, Load, LoopKernel, numbered


class Reduces(Enum):
    """What an epilogue reduces, in addition to what it stores per element."""

    NOTHING = "nothing"
    DOWN = "down"  # each column, over all rows
    ACROSS = "across"  # each row, over its columns


@dataclass(frozen=True)
class WithEpilogue:
    """A kernel that ends in an epilogue, to which it passes the value `accumulator`."""

    name: str
    summary: str
    epilogue: LoopKernel
    accumulator: str
    kind: ClassVar[str]
    on_tensor_cores: ClassVar[bool] = True

    @property
    def operands(self) -> tuple[Argument, ...]:
        """The arguments that the kernel itself reads."""
        raise NotImplementedError

    @property
    def column_axes(self) -> tuple[int, ...]:
        """The result's axes along a tile's columns; the other axes are along its rows."""
        raise NotImplementedError

    @property
    def all_rows(self) -> Dim:
        """The number of rows along those other axes."""
        raise NotImplementedError

    @property
    def operator(self) -> str:
        """The word for what is computed before the epilogue."""
        return self.kind

    def renamed(self, buffers: Mapping[str, str]) -> Self:
        """The same kernel with other operand names."""
        raise NotImplementedError

    def operand_bytes(self, sizes: Mapping[str, int], held: Mapping[str, int]) -> int:
        """Each operand once; `held` is as in `LoopKernel.bytes_moved`."""
        raise NotImplementedError

    def own_operations(self, sizes: Mapping[str, int]) -> int:
        """What is computed before the epilogue; multiply-adds are two operations each."""
        raise NotImplementedError

    @property
    def given(self) -> Load:
        """The load that the kernel answers from its registers."""
        return next(
            item
            for item in self.epilogue.body
            if isinstance(item, Load) and item.name == self.accumulator
        )

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The operands, then what else the epilogue reads, then what it writes."""
        known = {self.given.access.buffer, *(each.name for each in self.operands)}
        rest = [
            each for each in self.epilogue.arguments if each.is_output or each.name not in known
        ]
        return (*dict.fromkeys(self.operands), *rest)

    @property
    def reduces(self) -> Reduces:
        if not self.epilogue.inner:
            return Reduces.NOTHING
        return Reduces.ACROSS if self.given.access.strides[-1] == ONE else Reduces.DOWN

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.epilogue.symbols

    def canonical(self) -> Self:
        buffers = {self.given.access.buffer: "given"} | numbered(self.arguments)
        return replace(
            self.renamed(buffers),
            name="",
            summary="",
            epilogue=self.epilogue.under(buffers),
            accumulator=self.epilogue.numbered_values[self.accumulator],
        )

    def as_repeated(self) -> Self:
        return replace(self, epilogue=self.epilogue.as_repeated())

    def overwrites(self, source: str, target: str) -> bool:
        return False

    def is_empty(self, sizes: Mapping[str, int]) -> bool:
        return self.epilogue.is_empty(sizes)

    def bytes_moved(self, sizes: Mapping[str, int], held: Mapping[str, int]) -> int:
        """Each operand once, and what else the epilogue reads and writes."""
        numbers = math.prod(axis.size.at(sizes) for axis in self.epilogue.axes)
        beside = self.epilogue.bytes_moved(sizes) - ITEM_BYTES[self.given.dtype] * numbers
        return self.operand_bytes(sizes, held) + beside

    def operations(self, sizes: Mapping[str, int]) -> int:
        return self.own_operations(sizes) + self.epilogue.operations(sizes)
