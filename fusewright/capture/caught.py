"""Lookups that fail while Dynamo traces a forward, and whose exceptions forward catches.

Dynamo notes what a forward finds, and guards it. It does not guard that an attribute or a key is
missing, so a later call that finds one would still take the other path. Installed packages are
taken at their word.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch._dynamo import exc, symbolic_convert

_MISSING = (exc.ObservedAttributeError, exc.ObservedKeyError)
# Of code that Dynamo does not trace.
_CATCHING = frozenset(
    "AttributeError KeyError LookupError NameError StopIteration Exception BaseException".split()
)
# Installed packages look for much in vain, such as a user's entry in a registry of theirs.
_PACKAGES = frozenset(("site-packages", "dist-packages"))
_PYTHON = str(Path(dis.__file__).parent)


@contextlib.contextmanager
def noted_lookups() -> Iterator[list[str]]:
    """What this thread's traces look for in vain, where forward's own code catches the error."""
    found: list[str] = []
    translator = symbolic_convert.InstructionTranslatorBase
    handled, thread = translator.exception_handler, threading.get_ident()

    def noted(self: Any, raised: Any) -> None:
        step, code = self.current_instruction, self.f_code
        # The end of a loop is caught, too; `next` in a `try` is a call.
        ended = isinstance(raised, exc.ObservedUserStopIteration) and "CALL" in step.opname
        missing = (ended or isinstance(raised, _MISSING)) and threading.get_ident() == thread
        caught = getattr(step, "exn_tab_entry", None) is not None
        if missing and caught and not _is_installed(code):
            kind = type(raised).__name__.removeprefix("Observed").removeprefix("User")
            found.append(f"{code.co_name} catches {_a(kind)}")
        handled(self, raised)

    with mock.patch.object(translator, "exception_handler", noted):
        yield found


def catches(code: types.CodeType) -> bool:
    """Whether code that is not of an installed package may catch the error of a lookup."""
    if _is_installed(code):
        return False
    steps = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    named = any(each.opname == "CHECK_EXC_MATCH" for each in steps)
    if (named and _CATCHING & set(code.co_names)) or "suppress" in code.co_names:
        return True
    pairs = itertools.pairwise(each.opname for each in steps)
    inside = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return ("PUSH_EXC_INFO", "POP_TOP") in pairs or any(map(catches, inside))


def _is_installed(code: types.CodeType) -> bool:
    name = code.co_filename  # `<frozen os>`, for one
    return name.startswith((_PYTHON, "<frozen ")) or not _PACKAGES.isdisjoint(Path(name).parts)


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
