"""A program that was captured on the CPU, as a capture on a GPU would be.

Its inputs and everything computed from them are on the GPU. Numbers that forward makes, such as
torch.tensor(0.5), are on the CPU, where PyTorch puts them.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from fusewright.ir.graph import Arg, Graph, Input, Node, Program, Symbolic

_BY_DEVICE = [
    importlib.import_module(f"fusewright.capture.{name}") for name in ("losses", "pads", "scatters")
]


@contextmanager
def captured_for_gpu() -> Iterator[None]:
    """Capture chooses on the CPU what it chooses on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for module in _BY_DEVICE:
            patch.setattr(module, "LOOPS", ("cpu",))
        yield


def on_gpu(program: Program, stay: Collection[str] = ()) -> Program:
    """The program on a GPU; the inputs in `stay` are on the CPU."""
    forward, here = _placed(program.forward, stay)
    inference, _ = _placed(program.inference, stay)
    backward = program.backward
    if backward is not None:
        first = sum(result.kind != "saved" for result in program.results)
        saved = zip(program.forward.outputs[first:], backward.inputs, strict=False)
        backward, _ = _placed(backward, [taken.name for name, taken in saved if name in here])
    return replace(program, forward=forward, inference=inference, backward=backward)


def _placed(graph: Graph, stay: Collection[str]) -> tuple[Graph, set[str]]:
    """The graph, and its values on the CPU: those without dimensions that need no other."""
    here = set(stay)
    nodes = []
    for node in graph.nodes:
        small = node.spec is not None and not node.spec.shape
        if small and all(name in here for name in node.refs()):
            here.add(node.name)
        nodes.append(_node(node, "cpu" if node.name in here else "cuda"))
    inputs = [
        Input(each.name, replace(each.spec, device="cpu" if each.name in here else "cuda"))
        for each in graph.inputs
    ]
    return Graph(tuple(inputs), tuple(nodes), graph.outputs), here


def _node(node: Node, device: str) -> Node:
    spec = replace(node.spec, device=device) if node.spec is not None else None
    kwargs = tuple((key, _arg(value, device)) for key, value in node.kwargs)
    return replace(node, args=_arg(node.args, device), kwargs=kwargs, spec=spec)  # type: ignore[arg-type]


def _arg(arg: Arg, device: str) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_arg(item, device) for item in arg)
    named = isinstance(arg, Symbolic) and arg.kind == "device"
    return Symbolic("device", device) if named else arg
