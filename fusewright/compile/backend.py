"""The back-end for `torch.compile(model, backend="fusewright")`.

Dynamo finds it by its name. Each graph is planned and built on its own. A graph that we cannot
write in our language is run by PyTorch, operator by operator, with a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fusewright.capture.graphs import (
    ARGUMENTS,
    FlatGraph,
    Run,
    as_it_is,
    back_end,
    flat_graph,
    other_direction,
)
from fusewright.compile.call_kinds import DEVICES
from fusewright.compile.module import executed, kernels_of, loader
from fusewright.compile.pipeline import prepare_programs
from fusewright.compile.stages import Stages, logged
from fusewright.emit.bundle import Arguments, ModuleBundle
from fusewright.emit.drivers import device_kind
from fusewright.emit.flat import GRAPH, FlatCall, flat_text
from fusewright.errors import CaptureError, FusewrightError, ProblemError
from fusewright.ir.graph import Binding, ForwardOutput, Program, Symbol
from fusewright.rewrite import rewrite

# Modes of torch.compile, and whether they measure schedules.
_MODES = {"default": False, "max-autotune": True, "max-autotune-no-cudagraphs": True}


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str = "default",
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a graph for `torch.compile(model, backend="fusewright")`, which calls this.

    The option `tune`, or the mode max-autotune, measures several schedules of each kernel.
    """
    if mode not in _MODES:
        known = ", ".join(_MODES)
        raise ProblemError(f"the back-end fusewright has no mode {mode!r}; it has {known}")
    unknown = ", ".join(sorted(set(options or ()) - {"tune"}))
    if unknown:
        raise ProblemError(f"the back-end fusewright has no option {unknown}; it has tune")
    tune = bool((options or {}).get("tune", _MODES[mode]))
    return back_end(partial(compile_graph, tune=tune))(module, inputs)


def compile_graph(kind: str, module: fx.GraphModule, *, tune: bool = False) -> Run:
    """One graph of AOTAutograd: forward, backward or inference."""
    try:
        return _compiled(kind, module, tune)
    except FusewrightError as error:
        words = f"PyTorch runs this {kind} graph, operator by operator: {error}"
        warnings.warn(words, RuntimeWarning, stacklevel=2)
        return as_it_is(module)


def _compiled(kind: str, module: fx.GraphModule, tune: bool) -> Run:
    flat = flat_graph(module)
    device = _device(flat)
    tuning = logged if tune else None
    program, stages = replace(_program(kind, flat), again=_again(module)), Stages()
    # Dynamo calls a graph again at other sizes and knows nothing of our rules for them.
    how: dict[str, Any] = {"device": device, "tuning": tuning, "at_any_size": True}
    prepared = prepare_programs([program], stages, **how)
    source = prepared.source
    kernels = kernels_of(source, loader(source, device, []))
    if source.entries:
        kernels.build()
    bundle = ModuleBundle(kind, source.language, source, Arguments("", -1), prepared.modes)
    text = flat_text(bundle, _call(kind, flat))
    run: Run = executed(text, kernels, f"{kind} graph", {"math": math})[GRAPH]
    if not flat.constants:
        return run

    def run_with_constants(arguments: list[Any]) -> Sequence[Any]:
        arguments.extend(flat.constants)  # the same list, because it is emptied
        return run(arguments)

    return run_with_constants


def _again(module: fx.GraphModule) -> frozenset[str]:
    """The values of the other direction's graph. Those that both compute get the same bits."""
    other = other_direction(module)
    if other is None:
        return frozenset()
    try:
        graph = rewrite(_program("other", flat_graph(other))).inference
    except CaptureError:  # PyTorch runs that graph
        return frozenset(node.name for node in other.graph.nodes)
    return frozenset(node.name for node in graph.nodes)


def _call(kind: str, flat: FlatGraph) -> FlatCall:
    first = len(flat.graph.inputs) - len(flat.constants)
    constants = [each.name for each in flat.graph.inputs[first:]]
    sizes = tuple((each.name, each.text) for each in flat.sizes)
    # Dynamo guards the strides of forward's inputs. Gradients come as autograd made them.
    return FlatCall(ARGUMENTS, (*flat.arguments, *constants), sizes, any_layout=kind == "backward")


def _device(flat: FlatGraph) -> torch.device:
    """The device of the kernels: a GPU if any value is there."""
    specs = [*(each.spec for each in flat.graph.inputs), *(each.spec for each in flat.graph.nodes)]
    kinds = {device_kind(each) for each in specs if each is not None}
    if not kinds <= set(DEVICES):
        raise CaptureError(f"there are no kernels for {', '.join(sorted(kinds - set(DEVICES)))}")
    return torch.device("cuda" if "cuda" in kinds else "cpu")


def _program(kind: str, flat: FlatGraph) -> Program:
    """The graph as a program without gradients: AOTAutograd has made those a graph of their own."""
    graph = flat.graph
    return Program(
        mode=kind,
        bindings=tuple(Binding("input", str(i), False) for i in range(len(graph.inputs))),
        symbols=tuple(Symbol(each.name, -1, 0, each.example) for each in flat.sizes),
        guards=(),
        forward=graph,
        results=tuple(ForwardOutput("output", i) for i in range(len(graph.outputs))),
        backward=None,
        tangents=(),
        inference=graph,
        output_tree="",
    )
