"""AOTAutograd's joint graph of a model on fake tensors, split by the min-cut partitioner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.compile_utils import get_aten_target, rand_ops
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fusewright.capture.call import Flattened, ModelCall
from fusewright.capture.convert import Converter, is_random
from fusewright.capture.decompositions import decomposition_table, kept_whole
from fusewright.capture.effects import is_token, without_tokens
from fusewright.capture.losses import with_class_losses
from fusewright.capture.pools import with_pool_offsets
from fusewright.capture.program import Partition, make_program, placeholders
from fusewright.capture.recurrent import kept_or_written_out, save_what_layers_read
from fusewright.capture.scatters import with_choices
from fusewright.ir.graph import Program, Symbol


def trace(
    model: nn.Module,
    call: ModelCall,
    mode: str,
    dynamic: bool,
    all_gradients: bool,
    copied: set[int],
) -> Program:
    """Trace the model; outputs that share memory are added to `copied`, for later attempts."""
    shape_env = ShapeEnv(specialize_zero_one=False)
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    flattened = Flattened(model, call, frozenset(copied))
    fakes = [
        _fake(fake_mode, call.leaves[position], f"x{index}", dynamic, all_gradients)
        for index, position in enumerate(call.tensor_positions)
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(fake_mode)
        stack.enter_context(functorch_config.patch(fake_tensor_allow_meta=True))
        # These graphs are never run, so their Python code is not needed.
        stack.enter_context(_use_lazy_graph_module(True))
        stack.enter_context(kept_whole())
        stack.enter_context(kept_or_written_out())
        joint = aot_export_joint_with_descriptors(
            stack, flattened, tuple(fakes), {}, decompositions=decomposition_table()
        )
        shared = _shared_outputs(joint) - copied
        if not shared:
            partition = _partition(joint.graph_module)
    if shared:
        copied |= shared
        return trace(model, call, mode, dynamic, all_gradients, copied)
    symbols = _symbols(fakes, shape_env, partition.binding_positions)
    converter = Converter(model, {expr: symbol.name for expr, symbol in symbols})
    names = tuple(symbol for _, symbol in symbols)
    return make_program(partition, converter, names, shape_env, mode, flattened, fakes)


def _shared_outputs(joint: Any) -> frozenset[int]:
    """Outputs that share memory with an input or with each other.

    One autograd node cannot return them as views, so they are copied. The copy is pointwise and
    joins the kernel that computes the value.
    """
    info = joint._aot_state.fw_metadata.output_info
    return frozenset(
        position
        for position, each in enumerate(info)
        if each.output_type.name not in ("non_alias", "unsafe_view_alias")
        and issubclass(each.raw_type, torch.Tensor)
    )


def _fake(
    fake_mode: FakeTensorMode, tensor: torch.Tensor, name: str, dynamic: bool, grad: bool
) -> torch.Tensor:
    """A fake of one input; its first dimension is symbolic if `dynamic`."""
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


def _partition(joint: fx.GraphModule) -> Partition:
    """Split the joint graph; a graph without tangents has no backward graph."""
    with_class_losses(joint)
    (output,) = (node for node in joint.graph.nodes if node.op == "output")
    labels = tuple(output.meta["desc"])
    inputs = tuple(node.meta["desc"] for node in placeholders(joint))
    given = tuple(label for label in inputs if not is_token(label))
    primals = tuple(label for label in given if type(label).__name__ != "TangentAOTInput")
    if len(primals) == len(given):
        plain = tuple(label for label in labels if not is_token(label))
        return Partition(without_tokens(joint), None, primals, plain)
    # The last outputs are one gradient per primal, None included; only backward's tokens follow.
    later = sum(type(label).__name__ == "BackwardTokenAOTOutput" for label in labels)
    n_forward = len(labels) - len(primals) - later
    _drop_aliases(joint)
    save_what_layers_read(joint)
    with_pool_offsets(joint)
    with_choices(joint)
    joint_inputs = [node.meta.get("val") for node in placeholders(joint)]
    # Pointwise chains of any length are recomputed if that saves bytes. They are fused into the
    # kernel that reads them, so recomputing costs arithmetic and no memory traffic.
    recompute = functorch_config.patch(
        ban_recompute_used_far_apart=False, ban_recompute_long_fusible_chains=False
    )
    with recompute, _random_kept_apart(joint), _reductions_fused():
        forward, backward = min_cut_rematerialization_partition(
            joint, joint_inputs, num_fwd_outputs=n_forward
        )
    plain = tuple(label for label in labels[:n_forward] if not is_token(label))
    return Partition(without_tokens(forward), without_tokens(backward), primals, plain)


@contextlib.contextmanager
def _random_kept_apart(joint: fx.GraphModule) -> Iterator[None]:
    """The partitioner merges equal nodes, except those on its own short list of random operators.
    Without this, two exponential draws of the same shape would become one."""
    drawing: set[Any] = {get_aten_target(node) for node in joint.graph.nodes if is_random(node)}
    added = [each for each in drawing if each not in rand_ops]
    rand_ops.extend(added)
    try:
        yield
    finally:
        for each in added:
            rand_ops.remove(each)


@contextlib.contextmanager
def _reductions_fused() -> Iterator[None]:
    """Tell the partitioner which of our operators are fused. It assumes that an operator it does
    not know is a kernel of its own, and that its operands are in memory anyway. Of the operators
    that capture keeps whole, logsumexp is like other reductions; pools and the class check are
    fused but not run twice."""
    listed = partitioners.get_default_op_list
    known, whole = listed(), {torch.ops.aten.logsumexp}
    ours = torch.ops.fusewright
    fused = {ours.max_pool_offsets, ours.max_pool_offsets_backward, ours.class_index}
    more = replace(
        known,
        fusible_ops=known.fusible_ops | whole | fused,
        recomputable_ops=known.recomputable_ops | whole,
    )
    partitioners.get_default_op_list = lambda: more
    try:
        yield
    finally:
        partitioners.get_default_op_list = listed


def _drop_aliases(joint: fx.GraphModule) -> None:
    """Remove detach and alias. A traced graph is functional, so they are the value itself; but the
    partitioner would assume that their operands are stored anyway."""
    for node in list(joint.graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
    joint.recompile()


def _symbols(
    fakes: Sequence[torch.Tensor], shape_env: ShapeEnv, positions: Mapping[int, int]
) -> list[tuple[Any, Symbol]]:
    """The symbols that remain after the trace, each with the dimension that gives its value."""
    found: dict[Any, Symbol] = {}
    for index, fake in enumerate(fakes):
        for position, size in enumerate(fake.shape):
            if isinstance(size, int):
                continue
            expr = shape_env.simplify(size.node.expr)
            if expr.is_Symbol and expr not in found:
                name, example = f"s{len(found)}", int(size.node.hint)
                found[expr] = Symbol(name, positions[index], position, example)
    return list(found.items())
