"""PyTorch's global flags that decide speed and precision.

A candidate that leaves one changed alters the results and times of others. That is an error of the
candidate, and the flag is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fusewright.errors import VerifyError

_cudnn: Any = torch.backends.cudnn
_matmul: Any = torch.backends.cuda.matmul


@dataclass(frozen=True)
class Flag:
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


def _attribute(name: str, owner: Any, key: str) -> Flag:
    return Flag(name, lambda: getattr(owner, key), lambda value: setattr(owner, key, value))


FLAGS = (
    Flag(
        "float32_matmul_precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    _attribute("cuda.matmul.allow_tf32", _matmul, "allow_tf32"),
    _attribute("cuda.matmul.allow_fp16_accumulation", _matmul, "allow_fp16_accumulation"),
    _attribute("cudnn.allow_tf32", _cudnn, "allow_tf32"),
    _attribute("cudnn.benchmark", _cudnn, "benchmark"),
    _attribute("cudnn.deterministic", _cudnn, "deterministic"),
    Flag(
        "deterministic_algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    Flag("threads", torch.get_num_threads, torch.set_num_threads),
)


def flags() -> dict[str, str]:
    """The value of every flag, as text."""
    return {each.name: str(each.read()) for each in FLAGS}


@contextmanager
def steady_flags(whose: str) -> Iterator[None]:
    """Raise VerifyError if the block changes a flag; all flags are restored in any case."""
    before = [each.read() for each in FLAGS]
    changed = []
    try:
        yield
    finally:
        for flag, value in zip(FLAGS, before, strict=True):
            if (now := flag.read()) != value:
                changed.append(f"{flag.name} {value} → {now}")
                flag.write(value)
    if changed:
        raise VerifyError(
            f"{whose} leaves a global PyTorch flag changed ({', '.join(changed)}); restore it "
            "before forward returns"
        )
