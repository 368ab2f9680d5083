"""What products and windows have in common: they end in a loop over their result.

In that loop one load, `product`, is not read from memory: the kernel gives it, element by element,
from its registers.
"""

from __future__ import annotations

from enum import Enum

from fusewright.ir.graph import ONE, Dim
from fusewright.ir.loop import Argument, Load, LoopKernel


class Reduces(Enum):
    """What an epilogue reduces, beside what it stores for each element."""

    NOTHING = "nothing"
    DOWN = "down"  # each column, over all rows
    ACROSS = "across"  # each row, over its columns


class Ending:
    """The part of a kernel's description that knows of its epilogue."""

    epilogue: LoopKernel
    product: str

    @property
    def operands(self) -> tuple[Argument, ...]:
        """What the kernel itself reads."""
        raise NotImplementedError

    @property
    def column_axes(self) -> tuple[int, ...]:
        """The axes of the result that a tile's columns run along; along the others run its rows."""
        raise NotImplementedError

    @property
    def all_rows(self) -> Dim:
        """How many rows those axes make."""
        raise NotImplementedError

    @property
    def given(self) -> Load:
        """The load that the kernel answers from its registers."""
        return next(
            item
            for item in self.epilogue.body
            if isinstance(item, Load) and item.name == self.product
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
