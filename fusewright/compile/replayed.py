"""Lets programs replay CUDA graphs, and says of which ones that cannot be.

A program's drivers are replaced by objects that are called alike, so the run time and modules
without graphs know nothing of this. A copy of a module shares kernels, but has graphs of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.capture.graphs import Run
from fusewright.compile.cuda_graphs import CudaMachine, Machine
from fusewright.compile.owners import Modes
from fusewright.compile.replay import Replays
from fusewright.emit.bundle import ProgramPlans
from fusewright.emit.python import device_kind
from fusewright.emit.steps import LITERAL
from fusewright.errors import ProblemError
from fusewright.ir.graph import Node
from fusewright.plan.steps import Call, Plan, inputs_of
from fusewright.runtime import call

# torch.compile's name for CUDA graphs.
REDUCE_OVERHEAD = "reduce-overhead"
MODES = ("default", REDUCE_OVERHEAD)
REPLAYED = "replayed"  # a program's attribute: its `Part`s
_STAY = frozenset({"parameter", "buffer"})
_WAIT = frozenset({"data_dependent_output", "dynamic_output_shape", "cudagraph_unsafe"})


def wants_replays(mode: str) -> bool:
    """Whether a mode of `optimize` is the one with CUDA graphs. An error if there is none such."""
    if mode not in MODES:
        raise ProblemError(f"optimize has no mode {mode!r}; it has {', '.join(MODES)}")
    return mode == REDUCE_OVERHEAD


@dataclass(frozen=True)
class Part:
    """A driver, by its name, and its graphs; or why there are none."""

    name: str
    replays: Replays | None
    reason: str = ""

    def __str__(self) -> str:
        reason = self.reason
        if self.replays is not None:
            reason = self.replays.refused or self.replays.unfit
        held = self.replays.graphs if self.replays else 0
        words = f"{held} CUDA graph" + ("" if held == 1 else "s")
        if not reason:
            return f"{self.name}: {words}"
        others = "other calls are" if held else "calls are"
        return f"{self.name}: {words}; {others} launched kernel by kernel: {reason}"


class _Driver:
    """Stands for the driver of inference or forward. `True` may follow the tensors: buffers are
    then written in place."""

    def __init__(self, driver: Callable[..., Any], replays: Replays) -> None:
        self._driver, self._replays = driver, replays
        self.__globals__ = driver.__globals__  # where the profiler looks for kernels

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        driver = self._driver
        if given and given[-1] is True:
            return tuple(self._replays.results(True, [*given[:-1]], lambda t: driver(*t, True)))
        return tuple(self._replays.results(False, [*given], lambda t: driver(*t)))


class _Backward:
    """Stands for the driver of backward."""

    def __init__(self, driver: Callable[..., Any], replays: Replays) -> None:
        self._driver, self._replays = driver, replays
        self.__globals__ = driver.__globals__

    def __call__(
        self, values: list[Any], sizes: Any, device: torch.device, need: Sequence[bool]
    ) -> Sequence[Any]:
        missing = tuple([each is None for each in values])
        tensors = [each for each in values if each is not None]
        values.clear()
        driver = self._driver

        def run(given: list[Any]) -> Sequence[Any]:
            found = iter(given)
            filled = [None if absent else next(found) for absent in missing]
            given.clear()
            result: Sequence[Any] = driver(filled, sizes, device, need)
            return result

        facts = (tuple(sizes), tuple(need), missing)
        return self._replays.results(facts, tensors, run)


def with_replays(modes: Modes, planned: Sequence[ProgramPlans]) -> Modes:
    """The programs of these plans with graphs of their own."""
    machine, made = CudaMachine(), []
    for mode, plans in zip(modes, planned, strict=True):
        mine = copy.copy(mode)
        mine.fitted = [(), ()]
        vars(mine)[REPLAYED] = tuple(_parts(mine, plans, machine))
        made.append(_installed(mine, mode))
    return tuple(made)


def renewed(modes: Sequence[call._FwMode]) -> Modes:
    """The programs for a copy of the module, whose parameters are elsewhere."""
    machine, made = CudaMachine(), []
    for mode in modes:
        parts: tuple[Part, ...] | None = vars(mode).get(REPLAYED)
        if parts is None:
            made.append(mode)
            continue
        mine = copy.copy(mode)
        mine.fitted = [(), ()]
        vars(mine)[REPLAYED] = tuple(
            Part(each.name, each.replays and each.replays.renewed(machine), each.reason)
            for each in parts
        )
        made.append(_installed(mine, mode))
    return tuple(made)


def _installed(mine: call._FwMode, of: call._FwMode) -> call._FwMode:
    for part in vars(mine)[REPLAYED]:
        if part.replays is not None:
            driver = getattr(of, part.name)
            driver = getattr(driver, "_driver", driver)
            kind = _Backward if part.name == "backward" else _Driver
            setattr(mine, part.name, kind(driver, part.replays))
    return mine


def _parts(mode: call._FwMode, plans: ProgramPlans, machine: Machine) -> Iterator[Part]:
    bindings = plans.program.bindings
    kept = _STAY | ({"constant"} if mode.states is None else set())
    stay = [each.kind in kept for each in bindings]
    written = [bindings[index] for index, _ in mode.mutations]
    for name, plan in plans.named:
        reason = refusal(plan)
        if mode.records:
            reason = "the model has a recurrent layer, which PyTorch's autograd records"
        elif any(each.kind not in _STAY for each in written):
            reason = "the model writes into an argument"
        if reason:
            yield Part(name, None, reason)
            continue
        if name == "backward":
            held = [index < len(stay) and stay[index] for index in mode.saved]
            yield Part(name, Replays(machine, _first(held), 0, False))
        else:
            views = name == "forward"
            yield Part(name, Replays(machine, _first(stay), mode.n_outputs, views))


def _first(stay: list[bool]) -> Callable[[Sequence[Tensor]], Sequence[bool]]:
    return lambda tensors: [*stay, *([False] * len(tensors))][: len(tensors)]


def replayed_run(kind: str, run: Run, plans: Sequence[Plan]) -> tuple[Run, Part]:
    """The run of a graph by Dynamo, with CUDA graphs if that is possible."""
    reason = next(filter(None, map(refusal, plans)), "")
    if reason:
        return run, Part(kind, None, reason)
    outputs = None if kind == "inference" else 0
    replays = Replays(CudaMachine(), _are_held, outputs, kind == "forward")

    def run_replayed(arguments: list[Any]) -> Sequence[Any]:
        is_tensor = [isinstance(each, Tensor) for each in arguments]
        others = [each for each, tensor in zip(arguments, is_tensor, strict=True) if not tensor]
        if not all(type(each) in (int, float, bool) or each is None for each in others):
            return run(arguments)
        tensors = [each for each, tensor in zip(arguments, is_tensor, strict=True) if tensor]
        arguments.clear()

        def run_them(given: list[Any]) -> Sequence[Any]:
            found, rest = iter(given), iter(others)
            both = [next(found) if tensor else next(rest) for tensor in is_tensor]
            given.clear()
            return run(both)

        return replays.results(tuple(map(_exact, others)), tensors, run_them)

    return run_replayed, Part(kind, replays)


def _exact(value: Any) -> tuple[type, str]:
    return type(value), repr(value)  # 1, 1.0 and True are equal, as are 0.0 and -0.0


def _are_held(tensors: Sequence[Tensor]) -> list[bool]:
    """Parameters, and what Dynamo knows to stay where it is."""
    mark = "_dynamo_static_input_type"
    return [isinstance(each, nn.Parameter) or hasattr(each, mark) for each in tensors]


def refusal(plan: Plan) -> str:
    """Why a graph would not do what this plan does. Empty if it would."""
    steps = [step for step in plan.steps if not (isinstance(step, Call) and _draws_nothing(step))]
    read = {name for step in steps for name in inputs_of(step)}
    for each in plan.inputs:
        if device_kind(each.spec) == "cuda":
            continue
        if plan_is_for_cpu(plan):
            return "there are CUDA graphs on GPUs only, and this runs on the CPU"
        if each.name in read or each.name not in {n for s in plan.steps for n in inputs_of(s)}:
            return f"{each.name} is on the CPU, and a graph would keep its value"
    calls = [step for step in steps if isinstance(step, Call)]
    literals = {step.name for step in calls if step.node.op == LITERAL}
    specs = dict(plan.specs)
    for step in calls:
        if step.node.op != LITERAL:
            names = [*step.outputs, *(each for each in inputs_of(step) if each not in literals)]
            if any(name in specs and device_kind(specs[name]) != "cuda" for name in names):
                return f"{step.node.op} runs on the CPU or copies from there"
            if reason := _refused(step.node):
                return reason
    return ""


def _refused(node: Node) -> str:
    tags = {tag.name for tag in getattr(_operator(node), "tags", ())}
    if tags & _WAIT:
        return f"{node.op} waits for the GPU"
    if node.effect:
        return f"{node.op} does more than to compute a result"
    if node.random and "attention" in node.op:
        return f"{node.op} draws random numbers in its own way"
    return ""


def _draws_nothing(step: Call) -> bool:
    """Whether it is attention without dropout.

    It has a seed all the same, which nobody reads. PyTorch puts that on the CPU, but on the GPU in
    a capture.
    """
    if "attention" not in step.node.op:
        return False
    schema = getattr(_operator(step.node), "_schema", None)
    names = [each.name for each in schema.arguments] if schema is not None else []
    if "dropout_p" not in names or step.node.effect:
        return False
    at, given = names.index("dropout_p"), dict(step.node.kwargs)
    dropout = step.node.args[at] if at < len(step.node.args) else given.get("dropout_p", 0.0)
    return dropout == 0.0


def plan_is_for_cpu(plan: Plan) -> bool:
    return all(device_kind(spec) == "cpu" for _, spec in plan.specs)


def _operator(node: Node) -> Any:
    """PyTorch's operator; None if it has none of this name."""
    namespace, _, rest = node.op.partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    return getattr(packet, overload or "default", None)
