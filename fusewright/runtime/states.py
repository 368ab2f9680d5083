"""Attributes that a model changes when it is called: a hidden state, a counter, a list."""

import typing

import torch

from fusewright.runtime.altered import _fw_inside
from fusewright.runtime.call import _fw_run, _FwMode
from fusewright.runtime.guard import _fw_flatten


def _fw_store(held: dict[str, typing.Any], kind: str, name: str, change: typing.Any) -> None:
    """Make one change to a module's attributes."""
    if kind == "set":
        held[name] = change
    elif kind == "add":
        held[name] = held[name] + change
    elif kind == "extend":
        held[name].extend(change)
    elif kind == "items":
        held[name][:] = change
    else:
        if kind == "fill":
            held[name].clear()
        held[name].update(change)


class _FwStates:
    """The attributes that a program depends on, and what a call does to them.

    `held`: path of the module, name, and the value as text, without its tensors, which are inputs
    of the program. `effects`: the kind of change, path and name; to write into a tensor in place,
    the kind is `write`, or `rewrite` if its graph ends, and the name is its position among the
    inputs.
    """

    def __init__(
        self,
        held: tuple[tuple[tuple[str, ...], str, str], ...],
        effects: tuple[tuple[str, tuple[str, ...], typing.Any], ...],
    ) -> None:
        self.held = held
        # A tensor by itself is an input, whose type is checked there.
        self.compared = [each for each in held if each[2] != "tensor"]
        self.effects = effects
        self.written = [name for kind, _, name in effects if kind in ("write", "rewrite")]

    def misfit(self, module: typing.Any, tensors: typing.Sequence[torch.Tensor]) -> str | None:
        """Which attribute the program was not made for, or None."""
        for path, name, text in self.compared:
            held = vars(_fw_inside(module, path))
            if (_fw_flatten(held[name], []) if name in held else "missing") != text:
                return f"attribute {'.'.join((*path, name))} is not {text}"
        for index in self.written:
            mine = tensors[index]
            if any(each is mine for at, each in enumerate(tensors) if at != index):
                return "a tensor that the model changes in place is given twice"
        return None

    def run(
        self,
        mode: _FwMode,
        module: typing.Any,
        tensors: tuple[torch.Tensor, ...],
        wanted: bool,
    ) -> typing.Any:
        """Run the program and make its changes."""
        given = tensors
        if wanted and self.written:
            # Backward may need the old values.
            given = tuple([t.clone() if i in self.written else t for i, t in enumerate(tensors)])
        result = _fw_run(mode, given, wanted)
        changes: tuple[typing.Any, ...] = ()
        if self.effects:
            result, changes = result
        for (kind, path, name), change in zip(self.effects, changes, strict=True):
            if kind in ("write", "rewrite"):
                if kind == "rewrite" and tensors[name].requires_grad:
                    tensors[name].detach_()
                tensors[name].copy_(change)
            else:
                _fw_store(vars(_fw_inside(module, path)), kind, name, change)
        return result
