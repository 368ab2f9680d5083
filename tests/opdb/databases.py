"""PyTorch's own databases of operators and modules, which its tests are made from.

They import `expecttest`, which only PyTorch's own tests need. Where it is missing, an empty module
stands for it. They also forbid the whole process to set flags such as `cudnn.allow_tf32`; here they
do not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch


@functools.cache
def operators() -> dict[str, Any]:
    """Each `OpInfo` by its name with its variant, such as `nn.functional.pad-reflect`."""
    with _harmless_import():
        from torch.testing._internal.common_methods_invocations import op_db
    found: dict[str, Any] = {}
    for each in op_db:
        variant = getattr(each, "variant_test_name", "")
        found.setdefault(f"{each.name}-{variant}" if variant else each.name, each)
    return dict(sorted(found.items()))


@functools.cache
def modules() -> dict[str, Any]:
    """Each `ModuleInfo` by its name, such as `nn.Linear`."""
    with _harmless_import():
        from torch.testing._internal.common_modules import module_db
    return dict(sorted((each.name, each) for each in module_db))


def is_pointwise(name: str) -> bool:
    """Whether PyTorch's database lists the operator among the functions of single numbers."""
    kinds = {each.__name__ for each in type(operators()[name]).__mro__}
    return bool(kinds & {"UnaryUfuncInfo", "BinaryUfuncInfo"})


@contextlib.contextmanager
def _harmless_import() -> Iterator[None]:
    _without_expecttest()
    kept: Any = patch.object(torch.backends, "disable_global_flags", lambda: None)
    with kept, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _without_expecttest() -> None:
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        empty: Any = types.ModuleType("expecttest")
        empty.TestCase, empty.assert_expected_inline = unittest.TestCase, None
        sys.modules["expecttest"] = empty
