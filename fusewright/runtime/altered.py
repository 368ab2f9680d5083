"""Whether a module is still as it was captured: its tree, its constants, its hooks.

The full comparison walks the tree by names. If nothing has changed, it remembers the objects
themselves, and the next call only checks that the same objects are still there.
"""

import operator
import typing

import torch

from fusewright.runtime.constants import (
    _FW_HOLDERS,
    _FW_LONG,
    _fw_constant,
    _fw_functions,
    _fw_items,
    _fw_number,
    _fw_same,
    _FwGone,
)

_fw_all_modules: typing.Any = torch.nn.modules.module
_FW_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Hooks that PyTorch runs for every module of the process.
_FW_EVERYWHERE = tuple([getattr(_fw_all_modules, f"_global{name}", {}) for name in _FW_HOOKS])


def _fw_inside(module: typing.Any, path: tuple[str, ...]) -> typing.Any:
    for name in path:
        child = module._modules.get(name)
        module = _FwGone if child is None else child  # an empty list of modules is false
    return module


def _fw_is_pytorchs(kind: typing.Any) -> bool:
    """Whether a module's class is one of PyTorch's. parametrize makes subclasses of any class."""
    made = "torch.nn.utils.parametrize"
    kinds = [each for each in kind.__mro__ if each.__module__ != made]
    return bool(kinds[0].__module__.startswith("torch.nn."))


def _fw_kind(owner: typing.Any) -> str:
    """The name of a submodule's class, with a prefix for classes of PyTorch."""
    kind = type(owner)
    return ("nn." if _fw_is_pytorchs(kind) else "") + str(kind.__qualname__)


def _fw_hook_text(hook: typing.Any) -> str | None:
    """A hook of torch.nn.utils as text, since capture includes its effect; None for others."""
    for kind in type(hook).__mro__:
        if kind.__module__.startswith("torch.nn.utils."):
            pairs = [(name, _fw_constant(value)) for name, value in vars(hook).items()]
            told = [f"{name}={value!r}" for name, value in pairs if value is not _FwGone]
            return f"{type(hook).__qualname__}({', '.join(told)})"
    return None


def _fw_hooks(owner: typing.Any) -> tuple[str | None, ...]:
    tables = [getattr(owner, name) for name in _FW_HOOKS]
    return tuple([_fw_hook_text(hook) for table in tables for hook in table.values()])


def _fw_must_run(path: typing.Sequence[str], hooks: tuple[str | None, ...]) -> str | None:
    """Why a submodule's hooks forbid the kernels, which do not call the submodule."""
    if None not in hooks:
        return None
    return f"hooks of {'.'.join(path)} must see its calls, and the kernels do not call it"


def _fw_hooked(module: typing.Any) -> str | None:
    """Which hooks only the original forward would run, or None."""
    if module._modules and any(_FW_EVERYWHERE):
        return "hooks of all modules must see each call, and the kernels call no submodule"
    for path, owner in module.named_modules():
        reason = _fw_must_run([path], _fw_hooks(owner)) if path else None
        if reason is not None:
            return reason
    return None


def _fw_owners(training: bool, rows: tuple[typing.Any, ...]) -> tuple[typing.Any, ...]:
    """What each submodule was like, from rows that hold equal ones together, with their paths."""
    owners = []
    for kind, values, children, tensors, hooks, paths in rows:
        for text in paths:
            path = tuple(text.split(".")) if text else ()
            told = not path or any(name == "training" for name, _ in values)
            mode = () if told else (("training", training),)
            owners.append((path, kind, (*mode, *values), children, tensors, hooks))
    return tuple(owners)


def _fw_altered(module: typing.Any, mode: typing.Any) -> str | None:
    """What has changed since capture, or None."""
    if mode.inner and module._modules and any(_FW_EVERYWHERE):
        return _fw_hooked(module)
    for path, kind, values, children, tensors, hooks in mode.owners:
        owner = _fw_inside(module, path)
        reason = _fw_altered_owner(owner, path, values, mode)
        if mode.tables and reason is None:
            reason = _fw_altered_tensors(module, owner, path, tensors)
        if mode.inner and path and reason is None:
            reason = _fw_altered_child(owner, path, kind, hooks)
        now = tuple([name for name, child in owner._modules.items() if child is not None])
        if reason is None and now != children:
            reason = f"the submodules of {'.'.join(path) or 'the model'} are {now}, not {children}"
        if reason is not None:
            return reason
    for path, name, thing in mode.pinned:
        owner = _fw_inside(module, path)
        held = _fw_functions(getattr(owner, name, None)) if name else (type(owner),)
        if held != thing:
            words = ", ".join([each.__qualname__ for each in thing])
            return f"{'.'.join((*path, name) if name else path)} is a new {words}"
    for place, name, thing in mode.watched:
        if isinstance(place, tuple):
            now = _fw_own_attribute(_fw_inside(module, place), name)
        else:
            now = place.get(name, _FwGone)
        if now is not thing:
            return f"attribute {name} is not the object of the capture"
    return None


def _fw_own_attribute(owner: typing.Any, name: str) -> typing.Any:
    """A module's own attribute, not that of its class; `_FwGone` if there is none."""
    if not torch.compiler.is_compiling():
        return vars(owner).get(name, _FwGone)
    # Dynamo guards attributes and the code of methods, but not which names a dictionary has.
    found, shared = getattr(owner, name, _FwGone), getattr(type(owner), name, _FwGone)
    codes = [getattr(each, "__code__", each) for each in (found, shared)]
    return _FwGone if codes[0] is codes[1] else found


def _fw_altered_child(
    owner: typing.Any, path: tuple[str, ...], kind: str, hooks: tuple[str | None, ...]
) -> str | None:
    if owner is _FwGone:
        return f"submodule {'.'.join(path)} is gone"
    if _fw_kind(owner) != kind:
        return f"{'.'.join(path)} is {_fw_kind(owner)} instead of {kind}"
    now = _fw_hooks(owner)
    if now != hooks:
        return _fw_must_run(path, now) or f"hooks of {'.'.join(path)} are {now}, not {hooks}"
    return None


def _fw_altered_owner(
    owner: typing.Any,
    path: tuple[str, ...],
    values: tuple[tuple[str, typing.Any], ...],
    mode: typing.Any,
) -> str | None:
    patched = _fw_own_attribute(owner, "forward") is not _FwGone
    for name, value in values:
        held = getattr(owner, name, None)
        now = _fw_constant(held) if mode.contains else _fw_number(held)
        if not _fw_same(now, value):
            return f"attribute {'.'.join((*path, name))} is not {value!r}"
        patched = patched and name != "forward"
    return f"{'.'.join(path)} has a forward of its own" if patched and path else None


def _fw_altered_tensors(
    module: typing.Any,
    owner: typing.Any,
    path: tuple[str, ...],
    tensors: tuple[tuple[str, str, typing.Any], ...],
) -> str | None:
    for table, name, here in tensors:
        tensor = getattr(owner, table).get(name)
        if (tensor is not None) != bool(here):
            return f"{'.'.join((*path, name))} is {'None now' if here else 'no longer None'}"
        if isinstance(here, tuple):
            first = getattr(_fw_inside(module, here[:-1]), table).get(here[-1])
            if first is not tensor:
                return f"{'.'.join((*path, name))} is no longer {'.'.join(here)}"
    return None


class _FwSeen(dict[typing.Any, typing.Any]):
    """For each program, the module's snapshot when it last fitted. A copy or a pickle of the module
    starts without any."""

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return _FwSeen, ()


class _FwSnapshot:
    """The objects of a module that was found unaltered.

    It is stored in the module's own dictionary and must not refer to it: such a cycle would keep
    the module alive until the garbage collector runs.
    """

    def __init__(self, module: typing.Any, mode: typing.Any) -> None:
        self.root = module._modules
        self.own: list[tuple[str, typing.Any]] = []
        self.items: list[tuple[typing.Any, str, typing.Any]] = []
        self.parts: list[tuple[typing.Any, ...]] = []
        if mode.inner:
            self.keep_inside(module)
        if mode.rare:
            self.keep_hooked()
        for path, _, values, _, tensors, _ in mode.owners:
            owner = _fw_inside(module, path)
            state = vars(owner)
            held = [(name, state.get(name)) for name, _ in values]
            if mode.rare:
                for _, value in held:
                    self.keep_items(value)
            self.own += () if path else held
            self.items += [(state, name, value) for name, value in held if path]
            for table, name, here in tensors:
                if mode.rare and here:
                    self.keep_tensor(module, getattr(owner, table), table, name, here)
                else:
                    self.items.append((getattr(owner, table), name, None))
        if mode.rare:
            self.is_rare = bool(self.hooked or self.here or self.ties or self.lists)
        if mode.watched:
            self.keep_watched(mode.watched)

    def keep_inside(self, module: typing.Any) -> None:
        inside = list(module.modules())[1:]
        every = [each for each in (module, *inside) if each._modules]
        self.tables = [(each._modules, [*each._modules.values()]) for each in every]
        # The table of a leaf must stay empty, as its hooks must.
        self.parts = [
            (each, type(each), vars(each), len(vars(each)), {} if each._modules else each._modules)
            for each in inside
        ]

    def keep_hooked(self) -> None:
        """Submodules whose hooks were captured are compared with them."""
        self.here: list[tuple[typing.Any, str]] = []
        self.ties: list[tuple[typing.Any, str, typing.Any, str]] = []
        self.lists: list[tuple[typing.Any, list[typing.Any]]] = []
        found = [(each, _fw_hook_objects(each[2])) for each in self.parts]
        self.parts = [each for each, hooks in found if not hooks]
        self.hooked = [(*each[:4], hooks) for each, hooks in found if hooks]

    def keep_watched(self, watched: typing.Sequence[typing.Any]) -> None:
        # The size of a submodule's dictionary tells that it has no more attributes.
        self.gone = [name for place, name, _ in watched if place == ()]
        rows = [each for each in watched if not isinstance(each[0], tuple)]
        self.places = [each for each in rows if not hasattr(each[0], "cell")]
        self.cells = [(place.cell, value) for place, _, value in rows if hasattr(place, "cell")]

    def keep_tensor(
        self, module: typing.Any, held: typing.Any, table: str, name: str, here: typing.Any
    ) -> None:
        """Remember where a tensor is; the tensor itself would be kept alive."""
        if isinstance(here, tuple):
            first = getattr(_fw_inside(module, here[:-1]), table)
            self.ties.append((held, name, first, here[-1]))
        else:
            self.here.append((held, name))

    def keep_items(self, value: typing.Any) -> None:
        """Remember the items of a list, dict or set: they may change while the object stays."""
        if isinstance(value, _FW_HOLDERS) and len(value) <= _FW_LONG:
            items = _fw_items(value)
            if isinstance(value, (list, dict, set)):
                self.lists.append((value, items))
            for item in items:
                self.keep_items(item)

    def holds(self, module: typing.Any, mode: typing.Any) -> bool:
        """Whether all objects are where they were: half a microsecond per submodule.

        Compared by identity: `==` with a tensor or an array does not give a bool. Plain loops:
        `map` and the like are no faster, and take 5 µs more when caches are cold.
        """
        own = module.__dict__
        if own["_modules"] is not self.root:
            return False
        for name, value in self.own:
            if own.get(name) is not value:
                return False
        for place, name, value in self.items:
            if place.get(name) is not value:
                return False
        if mode.watched:
            for place, name, value in self.places:
                if place.get(name, _FwGone) is not value:
                    return False
            for cell, value in self.cells:
                if cell.cell_contents is not value:
                    return False
            for name in self.gone:
                if name in own:
                    return False
        if mode.inner:
            for table, children in self.tables:
                if [*table.values()] != children:
                    return False
            for each, kind, state, size, leaf in self.parts:
                # The hook tables are looked up each time: code that clears hooks may replace them.
                if (
                    leaf
                    or state["_forward_hooks"]
                    or state["_forward_pre_hooks"]
                    or state["_backward_hooks"]
                    or state["_backward_pre_hooks"]
                    or type(each) is not kind
                    or len(state) != size
                ):
                    return False
            if self.tables and any(_FW_EVERYWHERE):
                return False
        if mode.rare and self.is_rare:
            return self.holds_rare()
        return True

    def holds_rare(self) -> bool:
        """The same for objects that few models have."""
        for each, kind, state, size, hooks in self.hooked:
            if type(each) is not kind or len(state) != size or _fw_hook_objects(state) != hooks:
                return False
        for table, name in self.here:
            if table.get(name) is None:
                return False
        for table, name, other, first in self.ties:
            if table.get(name) is not other.get(first):
                return False
        return all(_fw_same_items(*each) for each in self.lists)


def _fw_hook_objects(state: dict[str, typing.Any]) -> list[typing.Any]:
    return [hook for name in _FW_HOOKS for hook in state[name].values()]


def _fw_same_items(value: typing.Any, before: list[typing.Any]) -> bool:
    now = _fw_items(value)
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _fw_looked(module: typing.Any, mode: typing.Any) -> str | None:
    """The same as `_fw_altered`; remembers a module that was found unaltered."""
    seen = module.__dict__.get("_fw_seen")
    if seen is None:
        seen = module.__dict__["_fw_seen"] = _FwSeen()
    before = seen.get(mode)
    if before is not None and before.holds(module, mode):
        return None
    reason = _fw_altered(module, mode)
    if reason is None and _fw_is_python(module):
        seen[mode] = _FwSnapshot(module, mode)
    return reason


def _fw_is_python(module: typing.Any) -> bool:
    """Whether all submodules keep their state in dictionaries; TorchScript's do not."""
    for each in module.modules():
        state = vars(each)
        if not isinstance(state.get("_modules"), dict) or not state.keys() >= set(_FW_HOOKS):
            return False
    return True


def _fw_unaltered(module: typing.Any, mode: typing.Any) -> bool:
    seen = module.__dict__.get("_fw_seen")
    before = None if seen is None else seen.get(mode)
    if before is not None and before.holds(module, mode):
        return True
    return _fw_looked(module, mode) is None
