"""What a plan is made of: the steps of one graph, in launch order, and the values they leave.

A `Loop` is a fused kernel of ours; a `Product` is a matrix product and a `Window` a convolution of
ours, each with an epilogue written in the same loop language. A `Call` is an operator left to
PyTorch, with the reason in words. A `View` is a PyTorch operator that moves no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusewright.ir.convolution import WindowKernel
from fusewright.ir.graph import Dim, Input, Node, TensorSpec
from fusewright.ir.loop import LoopKernel
from fusewright.ir.matmul import ProductKernel
from fusewright.ir.weight_gradient import GradientKernel


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """A kernel of ours. `inputs` and `outputs` are the values bound to the kernel's arguments.

    `kernel.arguments` are first the inputs, then the outputs, in the same order as here.
    `bytes_moved` and `operations` are counted at the example's sizes.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operators: tuple[str, ...]
    bytes_moved: int
    operations: int


@dataclass(frozen=True, kw_only=True)
class Loop(_Kernel):
    """One fused loop."""

    kernel: LoopKernel


@dataclass(frozen=True, kw_only=True)
class Product(_Kernel):
    """One matrix product with what follows it."""

    kernel: ProductKernel


@dataclass(frozen=True, kw_only=True)
class Window(_Kernel):
    """One convolution with what follows it."""

    kernel: WindowKernel


@dataclass(frozen=True, kw_only=True)
class WindowGradient(_Kernel):
    """The gradient of a convolution by its weights."""

    kernel: GradientKernel


@dataclass(frozen=True)
class Call:
    """One PyTorch operator. `outputs` names its results, in order; unused ones are empty names."""

    node: Node
    outputs: tuple[str, ...]
    reason: str
    bytes_moved: int
    operations: int

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def operators(self) -> tuple[str, ...]:
        return (self.node.op,)


@dataclass(frozen=True)
class View:
    """A PyTorch operator that only looks at memory in another way; it costs nothing."""

    node: Node

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.node.name,)


Ended = Product | Window
OnCores = Ended | WindowGradient
# A kernel of ours.
Fused = Loop | OnCores
Step = Fused | Call | View


@dataclass(frozen=True)
class Plan:
    """One graph, planned. `specs` holds every value that any step reads or writes.

    Outputs of kernels are allocated with exactly their spec's shape and strides. Graph inputs,
    Call and View results are expected to have their spec's strides (dimensions of size one aside).
    """

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str | Dim | None, ...]
    specs: tuple[tuple[str, TensorSpec], ...]

    @property
    def loops(self) -> tuple[Loop, ...]:
        return tuple(step for step in self.steps if isinstance(step, Loop))

    @property
    def products(self) -> tuple[Product, ...]:
        return tuple(step for step in self.steps if isinstance(step, Product))

    @property
    def on_cores(self) -> tuple[OnCores, ...]:
        """Those that run on tensor cores."""
        return tuple(step for step in self.steps if isinstance(step, OnCores))

    @property
    def kernels(self) -> tuple[Fused, ...]:
        return tuple(step for step in self.steps if isinstance(step, Fused))


def marked(step: Step, repeated: frozenset[str]) -> Step:
    """The step, its kernel marked where backward computes anew what it stores."""
    if repeated.isdisjoint(step.outputs):
        return step
    match step:
        case Loop():
            return replace(step, kernel=replace(step.kernel, repeated=True))
        case Product():
            epilogue = replace(step.kernel.epilogue, repeated=True)
            return replace(step, kernel=replace(step.kernel, epilogue=epilogue))
        case Window():
            epilogue = replace(step.kernel.epilogue, repeated=True)
            return replace(step, kernel=replace(step.kernel, epilogue=epilogue))
    return step


def inputs_of(step: Step) -> tuple[str, ...]:
    """Names of the values a step reads."""
    if isinstance(step, Fused):
        return step.inputs
    return tuple(dict.fromkeys(step.node.refs()))
