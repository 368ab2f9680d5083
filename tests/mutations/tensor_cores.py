"""Bugs in matmuls and convolutions, which tests run in emulation."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_MATMUL = "fusewright/kernels/sm90/matmul"
_CONVOLUTION = "fusewright/kernels/convolution"

TENSOR_CORES = (
    Mutation(
        "lost-term",
        f"{_MATMUL}/sm90_fp16x3_gemm.cuh",
        "    multiply<kFreeMajorB>(sum, a.high_low[step].hi, lo + step * kStep, 1);\n",
        "",
        "a float32 matmul lacks one of its three terms",
        ("tests/kernels/test_fp16x3_matmul.py -k 'layout'",),
    ),
    Mutation(
        "matmul-batch-offset",
        f"{_MATMUL}/sm90_fp16x3_gemm.cuh",
        "return kContractedRowsB ? 1.f : b.inverse[batch * rows + q];",
        "return kContractedRowsB ? 1.f : b.inverse[q];",
        "all matmuls of a batch are scaled as the first one",
        ("tests/kernels/test_fp16x3_matmul.py -k batch",),
    ),
    Mutation(
        "split-k-last-part",
        f"{_MATMUL}/sm90_split_k.cuh",
        "for (int part = 1; part < sizes.parts; ++part) {",
        "for (int part = 1; part + 1 < sizes.parts; ++part) {",
        "the last part of a split sum is lost",
        ("tests/kernels/test_fp16x3_matmul.py -k share",),
    ),
    Mutation(
        "overflow-not-mended",
        f"{_MATMUL}/sm90_epilogue.cuh",
        "if (there && !isfinite(x)) x = result.plain",
        "if (there && isnan(x)) x = result.plain",
        "a sum that overflowed stays infinite",
        ("tests/kernels/test_fp16x3_matmul.py -k 'infinit'",),
    ),
    Mutation(
        "lost-swizzle",
        f"{_MATMUL}/sm90_load.cuh",
        "const int column = lane / 4 ^ (warp + i * kWarps) % 8;",
        "const int column = lane / 4;",
        "elements of an unaligned operand are not where they are read",
        ("tests/kernels/test_fp16x3_matmul.py -k layout",),
    ),
    Mutation(
        "row-scale",
        f"{_MATMUL}/sm90_round_operand.cuh",
        "most_of[thread / 32] = most;\n  __syncthreads();\n",
        "most_of[thread / 32] = most;\n",
        "warps scale a row by numbers that others have not measured yet",
        ("tests/kernels/test_rounded_matmul.py",),
    ),
    Mutation(
        "transposed-taps",
        f"{_CONVOLUTION}/taps.cuh",
        "return {remainder, transposed ? -steps : steps};",
        "return {remainder, steps};",
        "the taps of a transposed convolution read on the wrong side",
        ("tests/kernels/test_convolution.py -k transposed",),
    ),
    Mutation(
        "direct-padding",
        f"{_CONVOLUTION}/direct_convolution.cuh",
        "unsigned(at_y) < unsigned(of.y.in) && unsigned(at_x) < unsigned(of.x.in) &&",
        "unsigned(at_y) < unsigned(of.y.in) && at_x < of.x.in &&",
        "a convolution reads the row above where its left padding is",
        ("tests/kernels/test_direct_convolution.py",),
    ),
    Mutation(
        "depthwise-group",
        f"{_CONVOLUTION}/depthwise_convolution.cuh",
        "group = channel / of.channels_out;",
        "group = channel;",
        "a depthwise convolution with several outputs a channel reads the wrong channel",
        ("tests/plan/test_depthwise.py", "tests/kernels/test_direct_convolution.py"),
    ),
    Mutation(
        "weight-gradient-overwrites",
        "fusewright/kernels/sm90/gradient/sm90_weight_gradient_multiply.cuh",
        "if (onto) each([](float& sum, const float& there) { sum += there; });\n",
        "",
        "a weight gradient with several scales keeps the last part of its sum",
        ("tests/kernels/test_weight_gradient.py", "tests/kernels/test_staged_gradient.py"),
    ),
)
