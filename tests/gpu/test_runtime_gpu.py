"""The run time on a GPU: streams, CUDA graphs, no synchronisation, call overhead."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright import build
from fusewright.compile.loading import kernels_of, load
from fusewright.compile.module import optimized
from fusewright.emit.bundle import ModuleBundle, ProgramPlans
from fusewright.emit.file import file_text
from fusewright.plan.steps import Plan
from tests.support.gradients import output_and_gradients
from tests.support.handmade import Case, gemm_add_relu, with_calls
from tests.support.tensors import assert_same

KERNELS = r"""
#include <cstdint>
#include <cuda_runtime.h>
extern "C" const char* fw_error_text(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
__global__ void add_relu(const float* mm, const float* bias, float* out, int64_t s0) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i >= s0 * 5) return;
  float v = mm[i] + bias[i % 5];
  out[i] = v > 0 || v != v ? v : 0;
}
__global__ void relu_backward(const float* t, const float* out, float* grad, float* sum,
                              int64_t s0) {
  int j = threadIdx.x;
  float total = 0;
  for (int64_t i = 0; i < s0; ++i) {
    float v = out[i * 5 + j] > 0 ? t[i * 5 + j] : 0;
    if (grad) grad[i * 5 + j] = v;
    total += v;
  }
  if (sum) sum[j] = total;
}
extern "C" int fw_add_relu(const float* mm, const float* bias, float* out, int64_t s0, void*,
                           int device, void* stream) {
  if (s0) add_relu<<<(s0 * 5 + 127) / 128, 128, 0, (cudaStream_t)stream>>>(mm, bias, out, s0);
  return cudaGetLastError();
}
extern "C" int fw_relu_backward(const float* t, const float* out, float* grad, float* sum,
                                int64_t s0, void* workspace, int device, void* stream) {
  relu_backward<<<1, 5, 0, (cudaStream_t)stream>>>(t, out, grad, sum, s0);
  return cudaGetLastError();
}
"""


def on_cuda(plan: Plan) -> Plan:
    return replace(
        plan,
        inputs=tuple(replace(i, spec=replace(i.spec, device="cuda")) for i in plan.inputs),
        specs=tuple((name, replace(spec, device="cuda")) for name, spec in plan.specs),
    )


def cuda_bundle(case: Case) -> ModuleBundle:
    def moved(each: ProgramPlans) -> ProgramPlans:
        assert each.backward is not None
        return replace(
            each,
            forward=on_cuda(each.forward),
            inference=on_cuda(each.inference),
            backward=on_cuda(each.backward),
        )

    source = replace(case.bundle.source, language="cuda", text=with_calls(KERNELS))
    modes = tuple(moved(each) for each in case.bundle.modes)
    return replace(case.bundle, language="cuda", source=source, modes=modes)


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    case = gemm_add_relu()
    bundle = cuda_bundle(case)
    eager = case.model.cuda()
    kernels = kernels_of(bundle.source, lambda _: build.load(build.build(bundle.source)))
    return eager, optimized(copy.deepcopy(eager), load(bundle, kernels))


@pytest.mark.parametrize("rows", [0, 1, 7, 4096])
def test_results_without_synchronisation(pair: Any, rows: int) -> None:
    eager, fast = pair
    x = torch.randn(rows, 3, device="cuda")
    theirs = output_and_gradients(eager, x.clone().requires_grad_())
    output_and_gradients(fast, x.clone().requires_grad_())
    mine = x.clone().requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    made = output_and_gradients(fast, mine)
    torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(made, theirs, rtol=1e-4, atol=1e-4)


def test_the_current_stream_is_used(pair: Any) -> None:
    eager, fast = pair
    side = torch.cuda.Stream()
    x = torch.zeros(1024, 3, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(200_000_000)
        x.fill_(2.0)
        y = fast(x)
    side.synchronize()
    with torch.no_grad():
        assert_same(y, eager(torch.full_like(x, 2.0)))


def test_autocast_is_seen_after_calls_without_it(pair: Any) -> None:
    _, fast = pair
    x = torch.randn(64, 3, device="cuda")
    first, second = fast(x), fast(x)
    assert_same(second, first)
    with torch.autocast("cuda", torch.float16), pytest.warns(RuntimeWarning, match="autocast"):
        assert fast(x).dtype is torch.float32  # a float16 matmul plus a float32 bias


def test_forward_and_backward_in_a_cuda_graph(pair: Any) -> None:
    eager, fast = pair
    x = torch.randn(64, 3, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = None
            fast(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    fast.zero_grad()
    with torch.cuda.graph(graph):
        y = fast(x)
        y.sum().backward()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    theirs = output_and_gradients(eager, x.detach().clone().requires_grad_())
    assert_same([y.detach(), x.grad], theirs[:2])


def test_kernels_launched_early_wait_for_each_other() -> None:
    """Matmuls and convolutions start while the kernel before them ends (sm90_launch.cuh). Step
    after step, on another stream and in a graph, each reads what the one before wrote."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(64, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, 64, 1), nn.GELU()]
    eager = nn.Sequential(*layers, nn.Flatten(2), nn.Linear(28 * 28, 512)).cuda()
    fast = fusewright.optimize(copy.deepcopy(eager), torch.randn(16, 64, 28, 28, device="cuda"))

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        y = fast(x)
        return [y, *torch.autograd.grad(y.sum(), [x, *fast.parameters()])]

    inputs = [torch.randn(16, 64, 28, 28, device="cuda", requires_grad=True) for _ in range(6)]
    apart = []
    for x in inputs:
        torch.cuda.synchronize()
        apart.append([each.detach().clone() for each in step(x)])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for result, expected in zip([step(x) for x in inputs], apart, strict=True):
            assert all(map(torch.equal, result, expected))
    torch.cuda.current_stream().wait_stream(side)
    held = inputs[0].detach().clone().requires_grad_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step(held)
    for x, expected in zip(inputs, apart, strict=True):
        with torch.no_grad():
            held.copy_(x)
        graph.replay()
        assert all(map(torch.equal, made, expected))
    with torch.no_grad():
        error = (apart[0][0] - eager(inputs[0])).norm() / eager(inputs[0]).norm()
    assert error < 2e-3


def test_an_emitted_file_builds_with_pytorchs_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path))
    case = gemm_add_relu()
    text = file_text(cuda_bundle(case), case.source, "gemm_add_relu on a GPU")
    x = torch.randn(6, 3, device="cuda")
    seconds = []
    for _ in range(2):
        names: dict[str, Any] = {}
        exec(text, names)
        fast = names["ModelNew"](3, 5).cuda()
        start = time.perf_counter()
        assert_same(fast(x), names["Model"].forward(fast, x))
        seconds.append(time.perf_counter() - start)
    print(f"emitted file: cold build {seconds[0]:.2f} s, from the cache {seconds[1]:.3f} s")
    assert seconds[0] < 30 and seconds[1] < 0.5
    compiled = torch.compile(fast, fullgraph=True)
    assert_same(compiled(x), fast(x))


def test_a_misaligned_input_gets_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are built at the first such call; the others stay as they are."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE", str(tmp_path))
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.GELU()).cuda()
    x = torch.randn(6, 64, device="cuda")
    fast = fusewright.optimize(model, x)
    built = len(list(tmp_path.glob("*.so")))
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(6, 64)
    for more, given in ((0, x), (1, shifted), (1, shifted), (1, x)):
        theirs, ours = (each(given.clone() if given is x else given) for each in (model, fast))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert (len(list(tmp_path.glob("*.so"))) > built) is bool(more)


def microseconds(*runs: Callable[[], Any]) -> list[float]:
    """The host's time for one call of each: rounds in turn, the quietest of many short ones."""
    best = [float("inf")] * len(runs)
    for _ in range(300):
        for index, run in enumerate(runs):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                run()
            best[index] = min(best[index], (time.perf_counter() - start) / 20 * 1e6)
    return best


def test_call_overhead(pair: Any) -> None:
    _, fast = pair
    x = torch.randn(8, 3, device="cuda")
    mode = fast.__dict__["_fw_engine"].modes[0]
    tensors = [each.detach() for each in mode.gather(fast, (x,))]

    def inferred() -> Any:
        with torch.no_grad():
            return fast(x)

    bare, inference, training = microseconds(
        lambda: mode.inference(*tensors), inferred, lambda: fast(x)
    )
    print(f"bare {bare:.1f} us, no_grad +{inference - bare:.1f}, grad +{training - bare:.1f}")
    assert inference - bare <= 25 and training - bare <= 25
