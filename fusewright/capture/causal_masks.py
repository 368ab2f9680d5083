"""PyTorch's transformer layers compare each attention mask with the causal one, by its values.

The answer is only a hint: attention may then leave the mask out and compute the same. A trace has
no values, so it takes the mask as it is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch.nn.modules import transformer

_NAME = "_detect_is_causal_mask"


@contextlib.contextmanager
def masks_not_compared() -> Iterator[None]:
    """Masks count as causal only if the caller says so, in this thread, while the block runs."""
    compare, tracing = getattr(transformer, _NAME), threading.get_ident()

    def said(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        if threading.get_ident() == tracing:
            return is_causal is True
        return bool(compare(mask, is_causal, size))

    with patch.object(transformer, _NAME, said):
        yield
