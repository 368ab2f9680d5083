"""AOTAutograd's joint graph of a model on fake tensors, split by the min-cut partitioner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock
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
from fusewright.capture.effects import checks_kept, is_token, without_tokens
from fusewright.capture.equal_nodes import merging_lightly
from fusewright.capture.fake_results import compared_once
from fusewright.capture.losses import with_class_losses
from fusewright.capture.ones import unguarded_ones
from fusewright.capture.pools import with_pool_offsets
from fusewright.capture.program import Partition, make_program, placeholders
from fusewright.capture.recurrent import kept_or_written_out, save_what_layers_read
from fusewright.capture.repeats import copying
from fusewright.capture.scatters import with_choices
from fusewright.capture.sizes import remembered
from fusewright.capture.state import Attribute, Key
from fusewright.capture.tangents import laid_out_as_outputs
from fusewright.ir.graph import Program, Symbol

# Tracing replaces methods of nn.Module, and decompositions, for the whole process and restores them
# afterwards. Two threads at once would restore each other's replacements. The lock is Dynamo's own:
# each may wait for the other to compile, and with two locks both could wait for ever.
ONE_AT_A_TIME = compile_lock


@dataclass(frozen=True)
class Attempt:
    """How to trace: with symbolic sizes or fixed ones, and with whose gradients: those of all
    tensors, of those that require them, or none."""

    dynamic: bool
    gradients: str


def trace(
    model: nn.Module,
    call: ModelCall,
    mode: str,
    attempt: Attempt,
    copied: set[int],
    attributes: Sequence[Attribute] = (),
) -> tuple[Program, Mapping[Key, Any]]:
    """Trace the model; outputs that share memory are added to `copied`, for later attempts.

    Returns the program, and the values that its `attributes` will have at the next call.
    """
    shape_env = ShapeEnv(specialize_zero_one=False)
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    flattened = Flattened(model, call, frozenset(copied), attributes)
    fakes = _fakes(fake_mode, call, flattened.states.tensors, attempt)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(fake_mode)
        stack.enter_context(functorch_config.patch(fake_tensor_allow_meta=True))
        stack.enter_context(backward_without_autocast())
        # These graphs are never run, so their Python code is not needed.
        stack.enter_context(_use_lazy_graph_module(True))
        stack.enter_context(kept_whole())
        stack.enter_context(checks_kept())
        stack.enter_context(laid_out_as_outputs())
        stack.enter_context(remembered(shape_env))
        stack.enter_context(unguarded_ones(shape_env))
        stack.enter_context(compared_once(fake_mode))
        stack.enter_context(kept_or_written_out())
        joint = aot_export_joint_with_descriptors(
            stack, flattened, tuple(fakes), {}, decompositions=copying(decomposition_table())
        )
        shared = _shared_outputs(joint) - copied - flattened.only_written
        if not shared:
            _drop_copies(joint.graph_module, flattened.only_written)
            partition = _partition(joint.graph_module)
    if shared:
        copied |= shared
        return trace(model, call, mode, attempt, copied, attributes)
    symbols = _symbols(fakes, shape_env, partition.binding_positions)
    converter = Converter(model, {expr: symbol.name for expr, symbol in symbols})
    names = tuple(symbol for _, symbol in symbols)
    program = make_program(partition, converter, names, shape_env, mode, flattened, fakes)
    return program, flattened.states.later


def backward_without_autocast() -> contextlib.AbstractContextManager[None]:
    """Trace backward as it runs after a block of autocast: with the dtypes that forward had.

    Under autocast, the matmuls of a part of forward that disables it would have 16-bit gradients.
    """
    patched: contextlib.AbstractContextManager[None] = functorch_config.patch(
        backward_pass_autocast="off"
    )
    return patched


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


def _fakes(
    fake_mode: FakeTensorMode, call: ModelCall, held: Sequence[torch.Tensor], attempt: Attempt
) -> list[torch.Tensor]:
    """A fake of each input. Arguments of the same first size share its symbol; a tensor that the
    model holds has its own, which the trace may find to be the same."""
    given = [call.leaves[position] for position in call.tensor_positions]
    sizes = [DimDynamic.DUCK] * len(given) + [DimDynamic.DYNAMIC] * len(held)
    return [
        _fake(
            fake_mode, tensor, f"x{index}", size if attempt.dynamic else DimDynamic.STATIC, attempt
        )
        for index, (tensor, size) in enumerate(zip([*given, *held], sizes, strict=True))
    ]


def _fake(
    fake_mode: FakeTensorMode, tensor: torch.Tensor, name: str, first: DimDynamic, attempt: Attempt
) -> torch.Tensor:
    """A fake of one input, with this kind of first dimension."""
    from torch._dynamo.source import ConstantSource

    sizes = [
        first if position == 0 and size > 1 else DimDynamic.STATIC
        for position, size in enumerate(tensor.shape)
    ]
    context: Any = StatelessSymbolicContext(
        dynamic_sizes=sizes, constraint_sizes=[None] * len(sizes)
    )
    fake = fake_mode.from_tensor(
        tensor.detach(), symbolic_context=context, source=ConstantSource(name)
    )
    floating = tensor.is_floating_point() or tensor.is_complex()
    wanted = {"all": floating, "required": tensor.requires_grad, "none": False}
    return fake.requires_grad_(wanted[attempt.gradients])


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
    joint_inputs = [node.meta.get("val") for node in placeholders(joint)]
    forward, backward = split(joint, joint_inputs, num_fwd_outputs=n_forward)
    plain = tuple(label for label in labels[:n_forward] if not is_token(label))
    return Partition(without_tokens(forward), without_tokens(backward), primals, plain)


def split(
    joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **others: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph, by bytes."""
    _drop_aliases(joint)
    save_what_layers_read(joint)
    with_pool_offsets(joint)
    with_choices(joint)
    # Pointwise chains of any length are recomputed if that saves bytes. They are fused into the
    # kernel that reads them, so recomputing costs arithmetic and no memory traffic.
    recompute = functorch_config.patch(
        ban_recompute_used_far_apart=False, ban_recompute_long_fusible_chains=False
    )
    with recompute, _random_kept_apart(joint), _reductions_fused(), merging_lightly():
        return min_cut_rematerialization_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others
        )


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


def _drop_copies(joint: fx.GraphModule, written: frozenset[int]) -> None:
    """x.copy_(y) is y, if y has the same layout. An output must be a copy, unless y is an input and
    the output is only `written` into another tensor."""
    (output,) = (node for node in joint.graph.nodes if node.op == "output")
    labels = output.meta["desc"]
    plain = [type(each).__name__ == "PlainAOTOutput" and each.idx in written for each in labels]
    for node in list(joint.graph.nodes) if any(plain) else ():
        if node.target is torch.ops.aten.copy.default and _layout(node) == _layout(node.args[1]):
            source = node.args[1]
            node.replace_all_uses_with(source, delete_user_cb=lambda user: user is not output)
            if source.op == "placeholder":
                pairs = zip(output.args[0], plain, strict=True)
                output.args = ([source if free and each is node else each for each, free in pairs],)
            if not node.users:
                joint.graph.erase_node(node)


def _layout(node: fx.Node) -> tuple[Any, ...]:
    held = node.meta["val"]
    return held.dtype, held.device, *map(str, held.shape), *map(str, held.stride())


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
