"""The text that people read: arithmetic apart from its loops, equations, and its form."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import loop_kernels
from benchmarks.loop_kernels import access, kernel, row_major
from fusewright.codegen.arithmetic import Math, extracted
from fusewright.codegen.expressions import Expressions, Step
from fusewright.codegen.layout import assignment, call, declaration
from fusewright.codegen.source import KERNELS_LINE, Source
from fusewright.codegen.text import literal
from fusewright.compile.pipeline import prepare
from fusewright.ir.graph import Dim
from fusewright.ir.loop import Apply, Constant, Load, LoopKernel, Reduce, Store
from fusewright.kinds.registry import render
from fusewright.schedule.loops import choose
from fusewright.target.target import Target
from tests.support.models import ParametricLambda

ROOT = Path(__file__).resolve().parents[2]
S0 = Dim(1, ("s0",))
TARGETS = {"host": Target.host(), "cuda": Target.cuda()}


def relu_of_sum(
    name: str = "sum_relu", columns: int = 64, bias: tuple[int, int] = (0, 1)
) -> LoopKernel:
    body = [
        Load("x", "float32", row_major("x", S0, columns)),
        Load("bias", "float32", access("bias", *bias)),
        Constant("c", "float32", 0.1),
        Apply("sum", "float32", "add", ("x", "bias")),
        Apply("relu", "float32", "relu", ("sum",)),
        Apply("small", "bool", "le", ("relu", "c")),
        Store("relu", "float32", row_major("y", S0, columns)),
        Store("small", "bool", row_major("le", S0, columns)),
    ]
    given, results = {"x": "float32", "bias": "float32"}, {"y": "float32", "le": "bool"}
    loop = kernel(name, [S0, columns], [], given, results, body)
    return replace(loop, summary="add → relu → le")


def rendered(*loops: LoopKernel, target: str = "cuda") -> Source:
    on = TARGETS[target]
    return render([(each, choose(each, on, {"s0": 64})) for each in loops], on)


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_is_a_comment_and_its_arithmetic(target: str) -> None:
    text = rendered(relu_of_sum(), target=target).kernels
    assert (
        text
        == """\
namespace fused {

// sum_relu: add → relu → le; i < s0, j < 64; 576 B, 192 operations for each s0; 256 B once
//   y[i, j] = max(0, x[i, j] + bias[j])
//   le[i, j] = y[i, j] <= 0.1
struct sum_relu {
  FW_MATH void element(float x, float bias, float& relu, bool& small) {
    relu = fw::relu(x + bias);
    small = relu <= 0.1f;
  }
};

}  // namespace fused
"""
    )


def test_the_support_code_has_a_place_for_the_kernels() -> None:
    source = rendered(relu_of_sum(), loop_kernels.softmax(S0, 256))
    assert source.support.count(KERNELS_LINE) == 1
    assert source.support.replace(KERNELS_LINE, source.kernels) == source.text
    assert "fused::softmax" in source.support and "struct softmax {" in source.kernels


def test_equal_structures_share_a_struct_with_their_sizes() -> None:
    loops = (relu_of_sum(), relu_of_sum("sum_relu_2", 256), loop_kernels.softmax(S0, 256))
    source = rendered(*loops)
    assert "// sum_relu_2: as sum_relu; i < s0, j < 256" in source.kernels
    assert source.kernels.count("struct sum_relu") == 1
    assert "template <typename I, int kN0>\nstruct sum_relu_shape" in source.support
    for name, size in (("sum_relu", 64), ("sum_relu_2", 256)):
        alias = f"template <typename I>\nusing {name}_body = sum_relu_shape<I, {size}>;"
        assert alias in source.support
    other = rendered(relu_of_sum(), loop_kernels.softmax(S0, 256))
    assert "_shape" not in other.text, "one of a kind keeps its own sizes"


def test_other_structures_share_their_arithmetic() -> None:
    source = rendered(relu_of_sum(), relu_of_sum("by_rows", bias=(1, 0)))
    assert source.kernels.count("struct ") == 1
    assert "// Its arithmetic is that of sum_relu.\n" in source.kernels
    bases = re.findall(r"struct (\w+)_body : fw::Functor<fused::(\w+)>", source.support)
    assert bases == [("sum_relu", "sum_relu"), ("by_rows", "sum_relu")]


def test_values_with_names_of_operators_are_not_taken_for_each_other() -> None:
    def alone(name: str) -> LoopKernel:
        body = [
            Load("x", "float32", access("x", 1)),
            Apply(name, "float32", name, ("x",)),
            Store(name, "float32", access("y", 1)),
        ]
        return kernel(f"of_{name}", [S0], [], {"x": "float32"}, {"y": "float32"}, body)

    text = rendered(alone("exp"), alone("tanh")).kernels
    assert "return fw::exp(x);" in text and "return fw::tanh(x);" in text


def test_functors_have_numbers_for_names() -> None:
    text = rendered(loop_kernels.softmax(S0, 256)).support
    struct = text[text.index("struct softmax_body") :].partition("\n};")[0]
    assert "  const float* a0;\n  float* a1;\n" in struct and "elem.x0.read(a0 + " in struct
    assert "power" not in struct and "total" not in struct


def test_many_pointers_have_a_macro() -> None:
    names = [f"in_{at}" for at in range(6)]
    body = [Load(each, "float32", access(each, 1)) for each in names]
    body += [Apply("y", "float32", "add", (names[0], names[5]))]  # type: ignore[list-item]
    body += [Store("y", "float32", access("y", 1))]  # type: ignore[list-item]
    given = dict.fromkeys(names, "float32")
    text = rendered(kernel("wide", [S0], [], given, {"y": "float32"}, body)).support  # type: ignore[arg-type]
    assert "FW_ENTRY(wide, FW_LIST_7(void* a), int64_t s0) {" in text
    assert "fw::functor<wide_body>(FW_LIST_7(a), s0);" in text
    lists = re.findall(r"^#define FW_LIST_.*", text, re.MULTILINE)
    assert lists == [
        "#define FW_LIST_5(A) A##0, A##1, A##2, A##3, A##4",
        "#define FW_LIST_6(A) FW_LIST_5(A), A##5",
        "#define FW_LIST_7(A) FW_LIST_6(A), A##6",
    ]
    assert "FW_LIST" not in rendered(relu_of_sum()).support


def test_kernels_that_are_not_shown_are_in_the_support_code() -> None:
    loops = (loop_kernels.softmax(S0, 256), relu_of_sum(), relu_of_sum("sum_relu_2", 256))
    made = [(each, choose(each, TARGETS["cuda"], {"s0": 64})) for each in loops]
    source = render(made, TARGETS["cuda"], shown={"sum_relu_2"})
    assert "struct sum_relu_2 {" in source.kernels and "softmax" not in source.kernels
    assert "struct softmax {" in source.support
    assert "// sum_relu: as sum_relu_2; i < s0, j < 64" in source.support
    assert source.support.replace(KERNELS_LINE, source.kernels) == source.text
    assert [each.name for each in source.entries] == ["softmax", "sum_relu", "sum_relu_2"]


def test_sums_and_rows_have_equations() -> None:
    (text,) = (rendered(loop_kernels.softmax(S0, 256)).kernels,)
    lines = re.findall(r"^//   (.*)$", text, re.MULTILINE)
    assert lines == [
        "power = exp(x[i, j] - max_j(x[i, j]))",
        "y[i, j] = power / sum_j(power)",
    ]
    body = [
        Load("x", "float32", row_major("x", S0, 256)),
        Reduce("mean", "float32", "welford", "x", "m2"),
        Store("m2", "float32", access("y", 1, 0)),
    ]
    loop = kernel("squares", [S0], [256], {"x": "float32"}, {"y": "float32"}, body)
    assert "//   y[i] = sum_j((x[i, j] - mean_j(x[i, j]))^2)" in rendered(loop).kernels


def test_products_have_equations() -> None:
    def run(m: ParametricLambda, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, m.weight) + m.bias)

    model = ParametricLambda(run, weight=torch.randn(768, 512), bias=torch.randn(768))
    x = torch.randn(4096, 512)
    made = prepare(model, (x,), modes=("eval",), device=x.device, target=Target.cuda())
    equation = "relu[i, j] = max(0, sum_k(input_0[i, k] * weight[k, j]) + bias[j])"
    assert f"//   {equation}" in made.source.kernels
    convolution = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
    images = torch.randn(64, 64, 56, 56)
    made = prepare(convolution, (images,), modes=("train",), device=x.device, target=Target.cuda())
    text = " ".join(re.sub(r"\n// +", " ", made.source.kernels).split())
    assert (
        "[n, m, y, x] = sum_clh(input[n, c, y + l - 1, x + h - 1] * v0_weight[m, c, l, h])" in text
    )
    assert re.search(r"\[m, c, l, h\] = sum_nyx\(\w+\[n, m, y, x\] \* input\[n, c, y \+ l", text)


def test_arithmetic_is_taken_out_of_loops() -> None:
    math = Math({"c": "float"}, {"two": ("float", "2.0f")}, forwards=True)
    lines = [
        "FW_SWEEP(0) {",
        "  const float scale = row.scale[0];",
        "  FW_LANES(v, V, n) {",
        "    const float x = elem.x[v];",
        "    const float doubled = fw::mul(x, two);",
        "    const float y = fw::add(doubled, scale);",
        "    const float z = fw::exp(y);",
        "    fw::nth<0>(acc).add(v, z);",
        "    out_0.put(v, y);",
        "  }",
        "}",
    ]
    assert extracted(lines, math, "sweep_0") == [
        "FW_SWEEP(0) {",
        "  FW_LANES(v, V, n) {",
        "    float y, z;",
        "    sweep_0(elem.x[v], row.scale[0], y, z);",
        "    fw::nth<0>(acc).add(v, z);",
        "    out_0.put(v, y);",
        "  }",
        "}",
    ]
    assert math.lines() == [
        "FW_MATH void sweep_0(float x, float scale, float& y, float& z) {",
        "  y = x * 2.0f + scale;",
        "  z = fw::exp(y);",
        "}",
    ]


def test_near_and_far_arguments_share_a_function() -> None:
    math = Math({}, {}, forwards=False)
    near, far = (
        [
            "FW_VISIT() {",
            "  FW_LANES(v, V, n) {",
            "    const float x = elem.x[v];",
            f"    const float y = fw::exp({tag}x);",
            "    out_0.put(v, y);",
            "  }",
            "}",
        ]
        for tag in ("fw::Near{}, ", "")
    )
    assert "    out_0.put(v, element(x, fw::Near{}));" in extracted(near, math, "element")
    assert "    out_0.put(v, element(x));" in extracted(far, math, "element")
    assert math.lines() == [
        "template <class... Near>",
        "FW_MATH float element(float x, Near... near) {",
        "  return fw::exp(near..., x);",
        "}",
    ]


def test_calls_are_made_in_the_order_of_the_steps() -> None:
    """Signs of floats may stand where a later step reads their value."""
    types = dict.fromkeys("abcd", "float")
    steps = [
        Step("float", "one", "sub", "", ("a", "b")),
        Step("float", "two", "sub", "", ("c", "d")),
        Step("float", "three", "mul", "", ("one", "two")),
        Step("float", "four", "neg", "", ("three",)),
        Step("float", "five", "div", "", ("a", "fw::CommonDivisor(b)")),
        Step("bool", "six", "lt", "", ("four", "five")),
    ]
    written = list(Expressions(types, {}, 96).statements(steps, ["six"]))
    assert written == [
        "return -((a - b) * (c - d)) < fw::div(a, fw::CommonDivisor(b));",
    ]


def test_integers_are_not_written_as_operators() -> None:
    """They wrap around."""
    steps = [Step("int32_t", "y", "add", "", ("x", "x"))]
    assert list(Expressions({"x": "int32_t"}, {}, 96).statements(steps, ["y"])) == [
        "return fw::add(x, x);"
    ]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.1, "0.1f"),
        (0.9, "0.9f"),
        (1.0, "1.0f"),
        (1e-5, "1e-05f"),
        (-2.5, "-2.5f"),
        (1 / 3, "0.33333334f"),
        (16777217.0, "16777216.0f"),
        (3.4028234663852886e38, "3.4028235e+38f"),
    ],
)
def test_floats_have_few_digits(number: float, text: str) -> None:
    assert literal(number, "float32") == text
    value = torch.tensor(number, dtype=torch.float32)
    assert torch.tensor(float(text[:-1]), dtype=torch.float32) == value


def clang_format() -> str:
    if importlib.util.find_spec("clang_format") is None:
        pytest.skip("clang-format is not installed")
    import clang_format

    return str(clang_format.get_executable("clang-format"))


def formatted(text: str) -> str:
    command = [clang_format(), f"--style=file:{ROOT / '.clang-format'}", "--assume-filename=x.cu"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return done.stdout


def test_long_lines_break_as_clang_format_breaks_them() -> None:
    names = ["value", "of_a_tensor", "grad_output", "x", "running_mean_of_layer", "bias_of_it"]
    functions = []
    for count in range(1, 16):
        for length in (6, 30, 60):
            given = [f"{names[at % 6]}_{at}" for at in range(count)]
            typed = ", ".join(f"float {each}" for each in given)
            name = "f" * length
            head = declaration("FW_FN static float ", f"{name}({typed})", "", indent=0)
            lines = [
                f"  {line}" for line in assignment(f"const float y_{name[:9]}", name, given, 2)
            ]
            lines += [f"  {line}" for line in call("return ", name, given, ";", 2)]
            functions.append("\n".join([*head, *lines, "}"]))
    text = "\n\n".join(functions) + "\n"
    assert formatted(text) == text


def block(x: Tensor, m: ParametricLambda) -> Tensor:
    y = F.layer_norm(F.gelu(x @ m.weight) * m.scale, (256,)) + torch.cumsum(x, -1)
    return F.pad(y.softmax(-1), (1, 1)).amax(-1, keepdim=True) / y.abs().sum(1, keepdim=True)


def pooled(x: Tensor, m: ParametricLambda) -> Tensor:
    y = F.max_pool2d(F.conv2d(x, m.weight, padding=1), 3, 2, 1)
    return F.batch_norm(y, m.mean, m.variance, m.scale, m.shift, m.training).relu().mean((2, 3))


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "block": (
        lambda: ParametricLambda(
            lambda m, x: block(x, m), weight=torch.randn(256, 256), scale=torch.randn(256)
        ),
        (2048, 256),
    ),
    "half": (
        lambda: ParametricLambda(
            lambda m, x: F.silu(x.half() * m.scale).softmax(0).transpose(0, 1).contiguous(),
            scale=torch.randn(()),
        ),
        (96, 100),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(64, 128, 3, stride=2, padding=1),
            nn.BatchNorm2d(128),
            nn.SiLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(128, 128, 3, groups=128),
            nn.GroupNorm(8, 128),
            nn.ConvTranspose2d(128, 64, 2, stride=2),
        ),
        (32, 64, 56, 56),
    ),
}


@pytest.mark.parametrize("target", ["host", "cuda", "plain", "trials"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_text_is_in_clang_formats_form(name: str, target: str) -> None:
    chosen = {
        **TARGETS,
        "plain": Target.cuda(tensor_cores=False),
        "trials": Target.cuda(trials=("half_matmuls", "fused_reductions"), conv_tf32=False),
    }[target]
    make, shape = PROGRAMS[name]
    x = torch.randn(shape)
    source = prepare(make(), (x,), modes=("train",), device=x.device, target=chosen).source
    for text in (source.kernels, source.support):
        assert formatted(text) == text
        assert max(map(len, text.splitlines())) <= 100
    ours = "namespace|clang-format|The fused|Kernels that can|Which|float32's"
    assert not re.search(rf"//(?! (?:{ours}))", strip(source))


def strip(source: Source) -> str:
    """The support code without strings and without the marks of conditions."""
    return re.sub(r'"[^"\n]*"|#endif  // \w+', "", source.support)
