"""The physical limit: rates measured in this run, and the least work that a problem needs.

The least bytes are those of a perfect program: it reads every input and parameter once, writes
every output and gradient once, and stores nothing in between. The operations are those of the
matmuls and convolutions in the captured graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusewright.bench.clock import Clock
from fusewright.bench.record import Floor, Rates
from fusewright.ir.graph import Graph, Program
from fusewright.plan.cost import call_operations
from fusewright.verify.precision import strict_matmuls

_REPEATS = 16
_WARM_UPS = 3
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}


def measure_rates(device: torch.device, clock: Clock, *, quick: bool) -> Rates:
    """Copy bandwidth (bytes read plus bytes written) and matmul rates, each the best of several."""
    size = _COPY_BYTES[device.type] // (4 if quick and device.type == "cpu" else 1)
    copying = 2 * size / _copy_s(clock, device, size)
    width = _MATMUL_SIZE[device.type]
    classes = {"fp32": torch.float32}
    if device.type == "cuda":
        classes |= {"tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    matmuls = {
        name: 2 * width**3 / _matmul_s(clock, device, width, dtype, tf32=name == "tf32")
        for name, dtype in classes.items()
    }
    return Rates(copying, matmuls)


def _copy_s(clock: Clock, device: torch.device, size: int) -> float:
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return _best_s(clock, lambda: target.copy_(source))


def _matmul_s(
    clock: Clock, device: torch.device, width: int, dtype: torch.dtype, *, tf32: bool
) -> float:
    left = torch.randn(width, width, device=device).to(dtype)
    right = torch.randn(width, width, device=device).to(dtype)
    out = torch.empty_like(left)
    with strict_matmuls():
        torch.backends.cuda.matmul.allow_tf32 = tf32
        return _best_s(clock, lambda: torch.mm(left, right, out=out))


def _best_s(clock: Clock, call: Callable[[], object]) -> float:
    times = [clock.sample(call).stream_us for _ in range(_WARM_UPS + _REPEATS)]
    return min(times[_WARM_UPS:]) * 1e-6


def floor_of(program: Program, pass_name: str, rates: Rates) -> Floor:
    """The least bytes and operations of a pass, and how long they take at these rates.

    `program` is the captured one, before any rewriting.
    """
    least = forward_bytes(program) if pass_name == "forward" else train_bytes(program)
    graphs = [program.inference] if pass_name == "forward" else [program.forward, program.backward]
    operations = sum(graph_operations(each, program) for each in graphs if each)
    memory = least / rates.copy_bytes_per_s * 1e6
    floors = {"memory": memory}
    for kind, rate in rates.products.items():
        floors[kind] = max(memory, operations / rate * 1e6)
    return Floor(least, operations, floors)


def forward_bytes(program: Program) -> int:
    """The bytes that inference reads of its inputs and writes to outputs and updated buffers."""
    return _read_bytes(program.inference, program) + _written_bytes(program.inference, program)


def train_bytes(program: Program) -> int:
    """Reads: inputs, parameters, incoming gradients. Writes: outputs, updates, gradients."""
    if program.backward is None:
        return forward_bytes(program)
    sizes, specs = program.example_sizes, program.forward.specs()
    reads = _read_bytes(program.forward, program)
    # Saved values do not count: a perfect program reads the inputs once for both graphs.
    tangents = program.backward.inputs[len(program.backward.inputs) - len(program.tangents) :]
    reads += sum(each.spec.bytes_at(sizes) for each in tangents)
    results = zip(program.forward.outputs, program.results, strict=True)
    names = {name for name, each in results if isinstance(name, str) and each.kind != "saved"}
    writes = sum(spec.bytes_at(sizes) for name in names if (spec := specs.get(name)))
    return reads + writes + _written_bytes(program.backward, program)


def graph_operations(graph: Graph, program: Program) -> int:
    """Operations of all matmuls and convolutions of a graph."""
    specs = {name: spec for name, spec in graph.specs().items() if spec is not None}
    return sum(call_operations(node, specs, program.example_sizes) for node in graph.nodes)


def _read_bytes(graph: Graph, program: Program) -> int:
    used = {name for node in graph.nodes for name in node.refs()}
    used |= {name for name in graph.outputs if isinstance(name, str)}
    sizes = program.example_sizes
    return sum(each.spec.bytes_at(sizes) for each in graph.inputs if each.name in used)


def _written_bytes(graph: Graph, program: Program) -> int:
    specs, given = graph.specs(), {each.name for each in graph.inputs}
    names = {name for name in graph.outputs if isinstance(name, str)} - given
    found = (specs.get(name) for name in names)
    return sum(spec.bytes_at(program.example_sizes) for spec in found if spec)
