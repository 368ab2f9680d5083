"""From a live model to a `Program`: every private interface of PyTorch that we use is here.

AOTAutograd traces forward and backward into one joint graph on fake tensors, with the first
dimension of each input symbolic; PyTorch's min-cut partitioner decides by bytes what is saved
and what is recomputed; the two halves are then copied into our own frozen graph language.
A size that our `Dim` cannot express makes the capture start again with fixed sizes.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from fusewright.convert import Converter, InexpressibleSize, guard_texts
from fusewright.decompositions import decomposition_table
from fusewright.errors import CaptureError
from fusewright.ir import (
    Binding,
    Graph,
    Program,
    Result,
    Symbol,
    validate,
)
from fusewright.naming import binding_names, distinct, renamed

_TORCH_FOLDER = os.path.dirname(torch.__file__)


@dataclass(frozen=True)
class Call:
    """One call of the model: its flattened arguments and how to put them together again."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        return Call(tuple(leaves), spec)

    @property
    def tensor_positions(self) -> tuple[int, ...]:
        return tuple(i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))


class _Flattened(nn.Module):
    """The model as a function from tensors to tensors; the output's structure is kept aside."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.output_tree = "o[0]"

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        leaves = list(self.call.leaves)
        for position, tensor in zip(self.call.tensor_positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.call.spec)
        flat: list[Any] = []
        self.output_tree = _tree_text(self.model(*args, **kwargs), flat)
        return tuple(flat)


def _tree_text(value: Any, flat: list[Any]) -> str:
    """Python text that rebuilds `value` from the list `o`, whose items are appended to `flat`."""
    if isinstance(value, torch.Tensor | torch.SymInt):
        flat.append(value)
        return f"o[{len(flat) - 1}]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if type(value) in (tuple, list):
        items = [_tree_text(item, flat) for item in value]
        if type(value) is list:
            return "[" + ", ".join(items) + "]"
        return "(" + "".join(item + ", " for item in items).rstrip(" ") + ")"
    if type(value) is dict:
        pairs = (f"{key!r}: {_tree_text(item, flat)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    raise CaptureError(
        f"the model returns a {type(value).__name__}; return tensors, numbers, tuples, lists "
        "or dicts of them"
    )


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str,
    dynamic: bool = True,
) -> Program:
    """Trace `model` in `mode` (train or eval) on example arguments."""
    call = Call.of(args, kwargs or {})
    attempts = [
        (dynamic_sizes, gradients)
        for dynamic_sizes in ((True, False) if dynamic else (False,))
        for gradients in ("floating", "as given")
    ]
    failure: Exception | None = None
    with _in_mode(model, mode):
        for dynamic_sizes, gradients in attempts:
            try:
                return _trace(model, call, mode, dynamic_sizes, gradients == "floating")
            except InexpressibleSize as error:
                failure = failure or error
            except CaptureError:
                raise
            except Exception as error:  # whatever user code raises becomes one named error
                if dynamic_sizes or gradients == "floating":
                    failure = failure or error
                    continue
                raise _explained(failure or error, model) from error
    raise _explained(failure or RuntimeError("no attempt was made"), model)


@contextlib.contextmanager
def _in_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Put every submodule into train or eval, and each back to what it was."""
    before = [(module, module.training) for module in model.modules()]
    model.train(mode == "train")
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _trace(
    model: nn.Module, call: Call, mode: str, dynamic: bool, all_gradients: bool
) -> Program:
    shape_env = ShapeEnv(specialize_zero_one=False)
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    flattened = _Flattened(model, call)
    fakes = [
        _fake(fake_mode, call.leaves[position], f"x{index}", dynamic, all_gradients)
        for index, position in enumerate(call.tensor_positions)
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(fake_mode)
        stack.enter_context(functorch_config.patch(fake_tensor_allow_meta=True))
        joint = aot_export_joint_with_descriptors(
            stack, flattened, tuple(fakes), {}, decompositions=decomposition_table()
        )
        graph_module = joint.graph_module
        halves = _partition(graph_module)
    symbols = _symbols(fakes, shape_env, halves.binding_positions)
    converter = Converter(model, {expr: symbol.name for expr, symbol in symbols})
    return _program(halves, converter, tuple(s for _, s in symbols), shape_env, mode, flattened)


def _fake(
    fake_mode: FakeTensorMode, tensor: torch.Tensor, name: str, dynamic: bool, grad: bool
) -> torch.Tensor:
    """A fake of one input, its first dimension symbolic where that is asked for."""
    from torch._dynamo.source import ConstantSource

    sizes = [
        DimDynamic.DUCK if dynamic and position == 0 and size > 1 else DimDynamic.STATIC
        for position, size in enumerate(tensor.shape)
    ]
    context: Any = StatelessSymbolicContext(
        dynamic_sizes=sizes, constraint_sizes=[None] * len(sizes)
    )
    fake = fake_mode.from_tensor(
        tensor.detach(), symbolic_context=context, source=ConstantSource(name)
    )
    floating = tensor.is_floating_point() or tensor.is_complex()
    return fake.requires_grad_(floating if grad else tensor.requires_grad)


@dataclass(frozen=True)
class _Halves:
    """The partitioned joint graph: both halves, what the inputs and forward outputs are."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    input_labels: tuple[Any, ...]
    output_labels: tuple[Any, ...]

    @property
    def binding_positions(self) -> Mapping[int, int]:
        """From the position of a tensor argument to the position among the forward inputs."""
        return {
            label.idx: position
            for position, label in enumerate(self.input_labels)
            if type(label).__name__ == "PlainAOTInput"
        }


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _outputs(module: fx.GraphModule) -> list[Any]:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    flat = output.args[0]
    return list(flat) if isinstance(flat, list | tuple) else [flat]


def _partition(joint: fx.GraphModule) -> _Halves:
    """Split the joint graph; a graph without tangents has no backward half."""
    (output,) = (node for node in joint.graph.nodes if node.op == "output")
    labels = tuple(output.meta["desc"])
    inputs = tuple(node.meta["desc"] for node in _placeholders(joint))
    tangents = sum(type(label).__name__ == "TangentAOTInput" for label in inputs)
    if not tangents:
        return _Halves(joint, None, inputs, labels)
    primals = inputs[: len(inputs) - tangents]
    n_forward = len(labels) - len(primals)  # one gradient per primal, None included, comes last
    _drop_aliases(joint)
    joint_inputs = [node.meta.get("val") for node in _placeholders(joint)]
    # Pointwise chains of any length are recomputed where that saves bytes: they are fused into
    # the kernel that reads them, so a recomputed value costs arithmetic and no memory.
    with functorch_config.patch(
        ban_recompute_used_far_apart=False, ban_recompute_long_fusible_chains=False
    ):
        forward, backward = min_cut_rematerialization_partition(
            joint, joint_inputs, num_fwd_outputs=n_forward
        )
    return _Halves(forward, backward, primals, labels[:n_forward])


def _drop_aliases(joint: fx.GraphModule) -> None:
    """A traced graph is functional, so detach and alias are the value itself; left in place, they
    make the partitioner take what lies behind them for something that is stored anyway."""
    for node in list(joint.graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
    joint.recompile()


def _symbols(
    fakes: Sequence[torch.Tensor], shape_env: ShapeEnv, positions: Mapping[int, int]
) -> list[tuple[Any, Symbol]]:
    """The symbols that are left after the trace, each with where to read it."""
    found: dict[Any, Symbol] = {}
    for index, fake in enumerate(fakes):
        for position, size in enumerate(fake.shape):
            if isinstance(size, int):
                continue
            expr = shape_env.simplify(size.node.expr)
            if expr.is_Symbol and expr not in found:
                example = int(size.node.hint)
                name = f"s{len(found)}"
                found[expr] = Symbol(name, positions[index], position, example)
    return list(found.items())


def _program(
    halves: _Halves,
    converter: Converter,
    symbols: tuple[Symbol, ...],
    shape_env: ShapeEnv,
    mode: str,
    flattened: _Flattened,
) -> Program:
    forward = converter.graph(halves.forward)
    bindings = tuple(_binding(label, node) for label, node in _labelled(halves))
    n_outputs = len(halves.output_labels)
    results = [_result(label, halves) for label in halves.output_labels]
    plain = forward.outputs[:n_outputs]
    saved = tuple(output for output in forward.outputs[n_outputs:] if isinstance(output, str))
    backward, tangents = _backward(halves, converter, saved, results, len(bindings))
    if backward is not None:
        backward, used = converter.with_saved_constants(backward, len(saved))
        saved += used
    results += [Result("saved", index) for index in range(len(saved))]
    inference = converter.with_constants(Graph(forward.inputs, forward.nodes, plain).pruned())
    forward = converter.with_constants(Graph(forward.inputs, forward.nodes, (*plain, *saved)))
    for graph in (forward, inference, *((backward,) if backward else ())):
        validate(graph)
    program = Program(
        mode=mode,
        bindings=bindings + converter.constant_bindings,
        symbols=symbols,
        guards=guard_texts(shape_env, converter),
        forward=forward,
        results=tuple(results),
        backward=_with_gradient_slots(backward, len(converter.constant_bindings)),
        tangents=tangents,
        inference=inference,
        output_tree=flattened.output_tree,
    )
    return _with_readable_names(program, flattened.model)


def _with_readable_names(program: Program, model: nn.Module) -> Program:
    """Inputs are called after the parameters and arguments they are."""
    graphs = [program.forward, program.inference]
    graphs += [program.backward] if program.backward else []
    taken = {node.name for graph in graphs for node in graph.nodes}
    taken |= {symbol.name for symbol in program.symbols}
    fresh = binding_names(program.bindings, model.forward, taken)
    names = {
        each.name: name for each, name in zip(program.forward.inputs, fresh, strict=True)
    }
    used = taken | set(fresh)
    if program.backward is not None:
        first = len(program.backward.inputs) - len(program.tangents)
        for each in program.backward.inputs[first:]:
            names[each.name] = distinct("grad_output", used)
    return replace(
        program,
        forward=renamed(program.forward, names),
        inference=renamed(program.inference, names),
        backward=renamed(program.backward, names) if program.backward else None,
    )


def _with_gradient_slots(backward: Graph | None, extra: int) -> Graph | None:
    """Constants are bindings too: they get no gradient, but their place in the list."""
    if backward is None:
        return None
    return Graph(backward.inputs, backward.nodes, backward.outputs + (None,) * extra)


def _labelled(halves: _Halves) -> Iterator[tuple[Any, fx.Node]]:
    yield from zip(halves.input_labels, _placeholders(halves.forward), strict=True)


def _binding(label: Any, node: fx.Node) -> Binding:
    value = node.meta["val"]
    differentiable = isinstance(value, FakeTensor) and value.is_floating_point()
    match type(label).__name__:
        case "ParamAOTInput":
            return Binding("parameter", label.target.removeprefix("model."), differentiable)
        case "BufferAOTInput":
            return Binding("buffer", label.target.removeprefix("model."), False)
        case "PlainAOTInput":
            return Binding("input", str(label.idx), differentiable)
    raise CaptureError(f"an input of kind {label!r} is not supported; simplify the arguments")


def _result(label: Any, halves: _Halves) -> Result:
    match type(label).__name__:
        case "PlainAOTOutput":
            return Result("output", label.idx)
        case "InputMutationAOTOutput":
            return Result("mutation", halves.input_labels.index(label.mutated_input))
    raise CaptureError(f"an output of kind {label!r} is not supported; return plain tensors")


def _backward(
    halves: _Halves,
    converter: Converter,
    saved: tuple[str, ...],
    results: Sequence[Result],
    n_bindings: int,
) -> tuple[Graph | None, tuple[int, ...]]:
    """The backward graph with its tangents told apart from the saved values by their labels."""
    if halves.backward is None:
        return None, ()
    graph = converter.graph(halves.backward)
    tangents = []
    for node in _placeholders(halves.backward):
        label = node.meta.get("desc")
        if type(label).__name__ == "TangentAOTInput":
            source: Any = label.output
            kind = type(source).__name__
            if kind != "PlainAOTOutput":
                raise CaptureError(
                    "a gradient flows through an argument that the model changes in place; "
                    "clone the argument first"
                )
            tangents.append(
                next(i for i, r in enumerate(results) if r == Result("output", source.idx))
            )
    outputs = graph.outputs
    assert len(outputs) == n_bindings, (len(outputs), n_bindings)
    expected = len(saved) + len(tangents)
    assert len(graph.inputs) == expected, (len(graph.inputs), expected)
    return graph, tuple(tangents)


def _explained(error: Exception, model: nn.Module) -> CaptureError:
    """The error as a sentence that points at the deepest line of the user's own code."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_TORCH_FOLDER)
        and os.path.dirname(os.path.abspath(frame.filename)) != os.path.dirname(__file__)
        and not frame.filename.startswith("<")
    ]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    line = f"\n    {frames[-1].line}" if frames and frames[-1].line else ""
    kind = type(error).__name__
    if "DataDependent" in kind:
        text = (
            "the model's control flow or a shape depends on the values of a tensor, so there is "
            "no one graph for it; use torch.where or move the decision out of the model"
        )
    else:
        text = f"{kind}: {str(error).strip().splitlines()[0] if str(error).strip() else kind}"
    return CaptureError(f"{where}cannot capture {type(model).__name__}: {text}{line}")

