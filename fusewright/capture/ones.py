"""Questions whether a size is one, whose answers need no guard.

Broadcasting asks this, and goes on as if the size were another. Our kernels give the same values
for size one. A check of strides asks, because any stride will do for size one. So these answers are
given without a guard. If forward itself asks the same, that is a question of its own: its answer is
guarded.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any
from unittest.mock import patch

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv, uninteresting_files

_FREE = """
    infer_size _broadcast_shapes _broadcast_in_dim_meta should_expand _engine_run_backward
    fast_binary_impl check_contiguous_sizes_strides is_channels_last_contiguous_2d should_swap
    is_channels_last_contiguous_3d coerce_tangent_and_suggest_memory_format _softmax _log_softmax
"""
_NAME = "evaluate_sym_node"


@contextlib.contextmanager
def unguarded_ones(shape_env: ShapeEnv) -> Iterator[None]:
    """Such questions about sizes of `shape_env` add no guards while the block runs."""
    plain, free = vars(ShapeEnv)[_NAME], frozenset(_FREE.split())
    skipped = uninteresting_files()
    skipped.add(__file__)  # A guard names the function that asked for it, which is none of ours.

    def evaluate(self: ShapeEnv, node: Any, *rest: Any, **more: Any) -> Any:
        if self is shape_env and _is_one(node.expr) and _asker(skipped) in free:
            with self.suppress_guards():
                return plain(self, node, *rest, **more)
        return plain(self, node, *rest, **more)

    with patch.object(ShapeEnv, _NAME, evaluate):
        yield


def _is_one(expr: Any) -> bool:
    """Whether an expression asks if a size is one."""
    return isinstance(expr, sympy.Eq | sympy.Ne) and sympy.S.One in expr.args


def _asker(skipped: set[str]) -> str:
    """The function that asks: the first on the stack that is not part of symbolic integers."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in skipped:
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else ""
