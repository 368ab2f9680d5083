"""The forward of a class by way of Dynamo, which guards what it reads; versions of it for what
Dynamo does not guard.

Another back-end is another entry for Dynamo, so each version has its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from fusewright.capture.relied_on import remove_from_cache
from fusewright.compile.backend import Traced, traced_backend
from fusewright.compile.original import original_class
from fusewright.compile.places import MOST_MADE, Places, Version
from fusewright.compile.sharing import Sharing

# More versions of one class than this are dropped, all at once.
MOST_VERSIONS = 32
_LOGS: dict[tuple[type[nn.Module], bool], list[Traced]] = {}
_VERSIONS: dict[type[nn.Module], list[tuple[Hashable, Version]]] = {}


def by_dynamo(
    module: nn.Module,
    any_size: bool,
    places: Places,
    shared: Sharing = (),
    *,
    tune: bool,
    replays: bool,
) -> Callable[..., Any] | None:
    """What runs a call of the module; None if its places changed too often."""
    kind, key = original_class(module), (any_size, tune, replays, places.key, shared)
    versions = _VERSIONS.setdefault(kind, [])
    for at, (known, version) in enumerate(versions):
        if known == key and version.fits(module):
            if at:
                versions.insert(0, versions.pop(at))
            return version.run
    if places.made > MOST_MADE:
        return None
    if len(versions) >= MOST_VERSIONS:
        versions.clear()
        remove_from_cache(kind.forward)
    places.made += 1
    version = Version(module, places)
    log = _LOGS.setdefault((kind, any_size), [])
    settings: dict[str, Any] = {"tune": tune, "replays": replays, "log": log, "version": version}
    ours = functools.partial(traced_backend, **settings)
    version.run = torch.compile(kind.forward, backend=ours, dynamic=True if any_size else None)
    versions.insert(0, (key, version))
    return version.run


def dynamo_graphs(kind: type[nn.Module]) -> list[Traced]:
    """The graphs of a class that Dynamo has made and still holds. All its modules share them."""
    logs = [_LOGS.get((kind, any_size), []) for any_size in (False, True)]
    return [each for log in logs for each in list(log) if each.graphs]
