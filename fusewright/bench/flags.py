"""PyTorch's switches that decide speed and precision. They are one for all candidates.

So a candidate that leaves one otherwise than it found it changes the times of the others: that is
an error of its own, and the switch is set back.
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
    """All of them in words."""
    return {each.name: str(each.read()) for each in FLAGS}


@contextmanager
def steady_flags(whose: str, *, foreign: bool = True) -> Iterator[None]:
    """Raise VerifyError where foreign code changed a flag; all are as they were afterwards."""
    if not foreign:  # PyTorch's own compilers know what they do.
        yield
        return
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
            f"{whose} sets a flag of PyTorch's for all candidates ({', '.join(changed)}): set it "
            "in forward, and back"
        )
