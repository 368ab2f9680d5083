"""What a plan consists of: the steps of one graph, in launch order, and the values they leave.

A `Fused` step is one of our kernels, of any kind. A `Call` is an operator left to PyTorch, with the
reason in words. A `View` is a PyTorch operator that moves no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fusewright.ir.graph import Dim, Input, Node, TensorSpec
from fusewright.ir.kernel import Kernel


@dataclass(frozen=True, kw_only=True)
class Fused:
    """A kernel of ours. `inputs` and `outputs` are the values bound to the kernel's arguments.

    `kernel.arguments` are first the inputs, then the outputs, in the same order as here.
    `bytes_moved` and `operations` are counted at the example's sizes. `staged` are outputs
    that the graph does not have: this kernel needs them itself, and another one may read them.
    """

    name: str
    kernel: Kernel
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operators: tuple[str, ...]
    bytes_moved: int
    operations: int
    staged: tuple[tuple[str, TensorSpec], ...] = ()

    @property
    def kind(self) -> str:
        return self.kernel.kind


@dataclass(frozen=True)
class Call:
    """One PyTorch operator. `outputs` names its results, in order; unused ones are empty names."""

    node: Node
    outputs: tuple[str, ...]
    reason: str
    bytes_moved: int
    operations: int
    kind: ClassVar[str] = "call"

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def operators(self) -> tuple[str, ...]:
        return (self.node.op,)


@dataclass(frozen=True)
class View:
    """A PyTorch operator that only reinterprets memory; it launches nothing."""

    node: Node
    kind: ClassVar[str] = "view"

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.node.name,)


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
    def kernels(self) -> tuple[Fused, ...]:
        return tuple(step for step in self.steps if isinstance(step, Fused))

    @property
    def on_tensor_cores(self) -> bool:
        """Whether some kernel runs only on GPUs with Hopper's tensor cores."""
        return any(step.kernel.on_tensor_cores for step in self.kernels)


def inputs_of(step: Step) -> tuple[str, ...]:
    """Names of the values a step reads."""
    if isinstance(step, Fused):
        return step.inputs
    return tuple(dict.fromkeys(step.node.refs()))
