"""The back-end for `torch.compile(model, backend="fusewright")`.

Dynamo finds it by its name. Each graph is planned and built on its own. A graph that we cannot
write in our language is run by PyTorch, operator by operator, with a warning.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fusewright.capture.breaks import GraphBreak, arguments_in, break_after, recompile_reason
from fusewright.capture.dynamo_failures import DynamoError, is_under_way
from fusewright.capture.graphs import (
    ARGUMENTS,
    FlatGraph,
    Run,
    as_it_is,
    back_end,
    flat_graph,
    other_direction,
)
from fusewright.capture.relied_on import note_zeros, relied_on, traced_code
from fusewright.compile.call_kinds import DEVICES
from fusewright.compile.engine import Engine
from fusewright.compile.execute import executed
from fusewright.compile.explanation import GraphFacts, steps_of
from fusewright.compile.loading import kernels_of, loader
from fusewright.compile.mistakes import reported
from fusewright.compile.original import original_class
from fusewright.compile.out_of_memory import is_out_of_memory
from fusewright.compile.pipeline import Prepared, prepare_programs
from fusewright.compile.places import Version
from fusewright.compile.replayed import REDUCE_OVERHEAD, Part, replayed_run
from fusewright.compile.stages import Stages, logged
from fusewright.emit.bundle import Arguments, ModuleBundle
from fusewright.emit.flat import GRAPH, FlatCall, flat_text
from fusewright.emit.python import device_kind
from fusewright.errors import CaptureError, FusewrightError, ProblemError, first_line
from fusewright.ir.graph import Binding, ForwardOutput, Program, Symbol
from fusewright.rewrite import rewrite
from fusewright.runtime import library

# Modes of torch.compile.
_TUNING = ("max-autotune", "max-autotune-no-cudagraphs")
_MODES = ("default", REDUCE_OVERHEAD, *_TUNING)


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str = "default",
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a graph for `torch.compile(model, backend="fusewright")`, which calls this.

    The option `tune`, or the mode max-autotune, measures several schedules of each kernel. The mode
    reduce-overhead replays CUDA graphs.
    """
    if mode not in _MODES:
        known = ", ".join(_MODES)
        raise ProblemError(f"the back-end fusewright has no mode {mode!r}; it has {known}")
    unknown = ", ".join(sorted(set(options or ()) - {"tune"}))
    if unknown:
        raise ProblemError(f"the back-end fusewright has no option {unknown}; it has tune")
    tune = bool((options or {}).get("tune", mode in _TUNING))
    compiled = partial(compile_graph, tune=tune, replays=mode == REDUCE_OVERHEAD)
    return back_end(compiled)(module, inputs)


@dataclass
class Traced:
    """A graph that Dynamo handed over for an optimized module, in the mode of that call.

    `parts` are its forward and backward, or its inference graph, each with the function that runs
    it. Dynamo holds that function until it is reset.
    """

    mode: str
    inputs: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    broken: GraphBreak | None
    parts: list[tuple[GraphFacts, weakref.ref[Run]]] = field(default_factory=list)

    def add(self, kind: str, made: Prepared | FusewrightError, run: Run) -> None:
        known = (self.mode, kind, self.inputs, self.sizes)
        if isinstance(made, FusewrightError):
            part = GraphFacts(*known, refused=str(made), by_dynamo=True)
        else:
            part = GraphFacts(*known, *steps_of(made.modes[0].inference), by_dynamo=True)
        self.parts.append((part, weakref.ref(run)))

    @property
    def graphs(self) -> tuple[GraphFacts, ...]:
        """The parts that Dynamo still holds."""
        return tuple(part for part, run in list(self.parts) if run() is not None)

    @property
    def replays(self) -> tuple[Part, ...]:
        """Their CUDA graphs, in the mode that has them."""
        found = [getattr(run(), "replays", None) for _, run in list(self.parts)]
        return tuple(each for each in found if each is not None)


def traced_backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    tune: bool,
    replays: bool = False,
    log: list[Traced],
    version: Version,
) -> Any:
    """The back-end of one version of an optimized class. It notes each graph in the log, and in the
    version what the graph relies on."""
    engine, caller, reason = _caller()
    codes = traced_code()
    if caller is not None and not version.is_known(caller, codes):
        version.watch(caller, relied_on(caller, codes))
    if caller is not None:
        note_zeros(caller, version.zeros)
    traced = Traced(_mode(caller), *arguments_in(module), break_after(module))
    # Dynamo has a reason if it compiled the function before. If only we did, ours counts.
    because = recompile_reason() or ("" if any(each.graphs for each in log) else reason)
    compiled = partial(compile_graph, tune=tune, replays=replays, note=traced.add)
    try:
        found = back_end(compiled)(module, inputs)
    except Exception as error:
        # Dynamo begins anew after some of its errors.
        told = isinstance(error, FusewrightError | DynamoError) or is_out_of_memory(error)
        if told or caller is None or not is_under_way(original_class(caller).forward):
            raise
        # The original forward would repeat what has run of it.
        found = _as_dynamo_made_it(module, error, traced)
    log[:] = [*(each for each in log if each.graphs), traced]
    if engine is not None and because:
        engine.record.recompiled(type(caller).__name__, because)
    return found


def _as_dynamo_made_it(module: fx.GraphModule, error: Exception, traced: Traced) -> Any:
    """A graph for whose compilation AOTAutograd failed, in eager mode."""

    def run(*arguments: Any) -> Any:
        return module(*arguments)

    failed = CaptureError(f"it cannot be compiled: {type(error).__name__}: {first_line(error)}")
    warnings.warn(f"eager mode runs a graph: {failed}", RuntimeWarning, stacklevel=2)
    traced.add("forward" if torch.is_grad_enabled() else "inference", failed, run)
    return run


def _caller() -> tuple[Engine | None, Any, str]:
    """The engine and the module whose call Dynamo is compiling, and why it went to Dynamo.

    They are found on the stack, so calls that compile nothing need not say them.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is Engine.by_dynamo.__code__:
            held = frame.f_locals
            return held["self"], held["module"], held["reason"]
        frame = frame.f_back  # type: ignore[assignment]
    return None, None, ""


def _mode(caller: Any) -> str:
    return "" if caller is None else "train" if caller.training else "eval"


# Called with the kind of a graph, what became of it, and the function that runs it.
Note = Callable[[str, Prepared | FusewrightError, Run], None]


def compile_graph(
    kind: str,
    module: fx.GraphModule,
    *,
    tune: bool = False,
    replays: bool = False,
    note: Note = lambda *facts: None,
) -> Run:
    """One graph of AOTAutograd: forward, backward or inference. `note` learns how it went."""
    try:
        return _compiled(kind, module, tune, replays, note)
    except FusewrightError as error:
        words = f"PyTorch runs this {kind} graph, operator by operator: {error}"
        warnings.warn(words, RuntimeWarning, stacklevel=2)
        run = as_it_is(module)
        note(kind, error, run)
        return run


def _compiled(kind: str, module: fx.GraphModule, tune: bool, replays: bool, note: Note) -> Run:
    tuning, stages = logged if tune else None, Stages()
    with reported("reading the graph"):
        flat = flat_graph(module)
        device = _device(flat)
        program = replace(_program(kind, flat), again=_again(module))
    # Dynamo calls a graph again at other sizes and knows nothing of our rules for them.
    how: dict[str, Any] = {"device": device, "tuning": tuning, "at_any_size": True}
    prepared = prepare_programs([program], stages, **how)
    source = prepared.source
    kernels = kernels_of(source, loader(source, device, []))
    if source.entries:
        kernels.build()
    bundle = ModuleBundle(kind, source.language, source, Arguments("", -1), prepared.modes)
    with reported("writing the program"):
        text = flat_text(bundle, _call(kind, flat))
        driver: Run = executed(text, kernels, f"{kind} graph", {"math": math})[GRAPH]
    run = _with_constants(driver, flat.constants) if flat.constants else driver
    run = _with_passed(run, flat.passed) if flat.passed else run
    part = None
    derived = as_it_is(module) if kind == "inference" else run
    if replays:
        run, part = replayed_run(kind, run, [each.inference for each in prepared.modes])
    run = _watched(run, driver, derived)
    run.replays = part  # type: ignore[attr-defined]
    note(kind, prepared, run)
    return run


def _with_constants(run: Run, constants: Sequence[torch.Tensor]) -> Run:
    def run_with_constants(arguments: list[Any]) -> Sequence[Any]:
        arguments.extend(constants)  # the same list, because it is emptied
        return run(arguments)

    return run_with_constants


def _with_passed(run: Run, passed: Sequence[tuple[int, int]]) -> Run:
    def run_with_passed(arguments: list[Any]) -> Sequence[Any]:
        held = [arguments[at] for _, at in passed]
        results = list(run(arguments))
        for (at, _), each in zip(passed, held, strict=True):
            results[at] = each
        return results

    return run_with_passed


def _watched(run: Run, driver: Run, derived: Run) -> Run:
    """A graph that the profiler sees, and that keeps the tangents of forward-mode derivatives.

    Kernels would lose these, and Dynamo guards them only if a graph reads one. `derived` runs then.
    If there are gradients, PyTorch itself refuses such a call.
    """
    profiler, duals = library._fw_profiler, torch.autograd.forward_ad

    def run_watched(arguments: list[Any]) -> Sequence[Any]:
        if profiler._is_profiler_enabled:
            library._fw_show(driver)
        return run(arguments) if duals._current_level < 0 else derived(arguments)

    return run_watched


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
