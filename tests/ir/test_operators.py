"""Every scalar operator of the table against PyTorch: special values exactly, random ones in ulps.

All operators of one dtype are compiled into one library by g++ with the flags of real builds, so
that the vectorised code is tested.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from fractions import Fraction

import mpmath
import pytest
import torch

from benchmarks.loop_kernels import access, kernel
from fusewright.ir.interpret import fp16_scale
from fusewright.ir.loop import Apply, Load, LoopKernel, Store
from fusewright.ir.operators import REDUCTIONS, SCALAR_OPS
from fusewright.kinds.registry import render
from fusewright.schedule.loops import choose
from fusewright.target.target import Target
from tests.support.loop_runs import compile_source
from tests.support.single_operators import N, pointwise

Tensor = torch.Tensor

FLOAT_ONLY = frozenset(
    """exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh
    cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid frac atan2 hypot copysign
    fmax fmin div finite_magnitude fp16_scale round_tf32""".split()
)
INT_ONLY = frozenset(
    "bitwise_not bitwise_and bitwise_or bitwise_xor shift_left shift_right".split()
)
NEEDS_NONZERO = frozenset("floor_divide trunc_divide remainder fmod".split())


def nearest_tf32(x: Tensor) -> Tensor:
    """Ten bits behind the point, ties away from zero; what cannot be rounded so stays."""
    digits, exponent = torch.frexp(x.double())
    near = torch.trunc(digits * 2**11 + digits.sign() / 2) / 2**10 * torch.exp2(exponent - 1.0)
    rounds = (x.abs() >= torch.finfo(x.dtype).tiny) & near.isfinite()
    rounds &= near.abs() <= torch.finfo(x.dtype).max
    return torch.where(rounds, near, x.double()).to(x.dtype)


TORCH: dict[str, Callable[..., Tensor]] = {
    "sub": torch.sub,
    "neg": torch.neg,
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor_divide": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    "lgamma": torch.lgamma,
    "finite_magnitude": lambda a: torch.where(a.isfinite(), a.abs(), 0),
    "fp16_scale": fp16_scale,
    "round_tf32": nearest_tf32,
}

CIRCULAR = ("sin", "cos", "tan")

# Units in the last place against float64 rounded to float32; measured, with a little room.
ULPS32 = {
    "asin": 1.5,
    "atan2": 1.5,
    "expm1": 1.5,
    "log1p": 1.5,
    "lgamma": 8.0,
    "sigmoid": 2.5,
    "tanh": 1.1,
    "erf": 1.25,
    "acosh": 3.0,
    "asinh": 3.0,
    "atanh": 1.2,
    "cosh": 2.5,
    "sinh": 3.0,
    "tan": 1.5,
    "rsqrt": 1.5,
}


def reference(op: str) -> Callable[..., Tensor]:
    return TORCH.get(op) or getattr(torch, op)


# Compared with PyTorch in other tests, the last two in test_arg_extremes and test_class_losses.
ELSEWHERE = ("where", "cast", "ordered", "class_index")


def ops_for(dtype: str) -> list[str]:
    names = [name for name in SCALAR_OPS if name not in ELSEWHERE]
    if dtype.startswith("float"):
        return [name for name in names if name not in INT_ONLY]
    return [name for name in names if name not in FLOAT_ONLY]


@functools.cache
def library(dtype: str) -> ctypes.CDLL:
    target = Target.host()
    loops = [pointwise(op, dtype) for op in ops_for(dtype)]
    return compile_source(render([(loop, choose(loop, target, {})) for loop in loops], target))


def apply(op: str, *operands: Tensor) -> Tensor:
    dtype = str(operands[0].dtype).removeprefix("torch.")
    padded = [torch.nn.functional.pad(each, (0, N - each.numel())) for each in operands]
    result = torch.bool if SCALAR_OPS[op].result == "bool" else operands[0].dtype
    out = torch.empty(N, dtype=result)
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (*padded, out)]
    entry = getattr(library(dtype), f"op_{op}_{dtype}")
    assert entry(*pointers, None, ctypes.c_int(1), None) == 0
    return out[: operands[0].numel()]


def corners(dtype: torch.dtype) -> Tensor:
    tiny = torch.finfo(dtype).tiny
    large = torch.finfo(dtype).max
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 10.0, 87.0, 100.0, 1000.0, 1e5]
    values += [tiny, tiny / 4, large, 1e-8, 0.3, 0.999, float("inf")]
    both = [sign * value for value in values for sign in (1, -1)]
    return torch.tensor([*both, float("nan")], dtype=torch.float64).to(dtype)


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    n = values.numel()
    return values.repeat_interleave(n).contiguous(), values.repeat(n).contiguous()


# The sign of these zeros is arbitrary in PyTorch's vectorised CPU code.
ZERO_SIGN_FREE = {"maximum", "minimum", "fmax", "fmin", "relu", "sign", "frac", "round", "trunc"}


def same_kind(ours: Tensor, theirs: Tensor, signed_zero: bool) -> Tensor:
    """NaN with NaN, infinity with the same infinity, zero with the same zero."""
    nan = torch.isnan(ours) == torch.isnan(theirs)
    infinite = torch.isinf(ours) | torch.isinf(theirs)
    equal_infinite = ~infinite | (ours == theirs) | torch.isnan(ours)
    zero = (ours == 0) & (theirs == 0)
    signs = ~zero | (torch.signbit(ours) == torch.signbit(theirs))
    return nan & equal_infinite & (signs if signed_zero else torch.ones_like(signs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", ops_for("float32"))
def test_corners(op: str, dtype: torch.dtype) -> None:
    values = corners(dtype)
    if op in ("fmod", "remainder"):
        # Eager's vectorised fmod gives NaN where the quotient overflows; fmod itself is exact.
        plain = (values.abs() >= 1e-8) & (values.abs() <= 1e5)
        values = values[(values == 0) | plain | ~values.isfinite()]
    operands = (values,) if SCALAR_OPS[op].arity == 1 else pairs(values)
    ours, theirs = apply(op, *operands), reference(op)(*operands)
    if SCALAR_OPS[op].result == "bool":
        assert torch.equal(ours, theirs)
        return
    exact = reference(op)(*(each.double() for each in operands)).to(dtype)
    # Where eager overflows on the way and float64 does not, either result is right.
    good = same_kind(ours, theirs, op not in ZERO_SIGN_FREE)
    good |= same_kind(ours, exact, op not in ZERO_SIGN_FREE)
    close = torch.isclose(ours, exact, rtol=1e-5, atol=1e-37) | torch.isclose(ours, theirs)
    good &= close | ~torch.isfinite(theirs) | ~torch.isfinite(exact)
    bad = ~good | (torch.isfinite(ours) & ~torch.isfinite(theirs) & ~torch.isfinite(exact))
    assert not bad.any(), [
        (*[o[i].item() for o in operands], ours[i].item(), theirs[i].item())
        for i in bad.nonzero().flatten()[:5].tolist()
    ]


def samples(op: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    count = SCALAR_OPS[op].arity
    draws = [torch.randn(N, generator=generator, dtype=torch.float64) for _ in range(count)]
    scales = [torch.rand(N, generator=generator, dtype=torch.float64) * 10 - 7 for _ in draws]
    values = [draw * torch.exp2(scale) for draw, scale in zip(draws, scales, strict=True)]
    if op in {"exp", "expm1", "exp2", "sinh", "cosh"}:
        values = [each * 10 for each in values]
    if op in {"asin", "acos", "atanh", "erfinv"}:
        values = [torch.tanh(each) for each in values]
    if op in {"log", "log2", "log10", "sqrt", "rsqrt", "lgamma", "digamma", "pow", "acosh"}:
        values = [each.abs() + (1 if op == "acosh" else 0) for each in values]
    if op == "log1p":
        values = [torch.where(each < -1, -each, each) for each in values]
    return tuple(each.to(dtype) for each in values)


def ulps(ours: Tensor, exact: Tensor) -> Tensor:
    """Distance from the float64 value in units of the float32's last place."""
    rounded = exact.float()
    spacing = torch.nextafter(rounded.abs(), torch.tensor(float("inf"))) - rounded.abs()
    return (ours.double() - exact).abs() / spacing.double().clamp(min=2.0**-149)


@pytest.mark.parametrize("op", ops_for("float32"))
def test_random_float32(op: str) -> None:
    operands = samples(op, torch.float32)
    ours = apply(op, *operands)
    if SCALAR_OPS[op].result == "bool":
        assert torch.equal(ours, reference(op)(*operands))
        return
    exact = reference(op)(*(each.double() for each in operands))
    finite = torch.isfinite(exact.float()) & torch.isfinite(ours)
    assert torch.equal(torch.isnan(ours), torch.isnan(exact))
    distance = ulps(ours, exact)[finite]
    worst = int(distance.argmax())
    print(op, float(distance.max()))
    assert distance.max() <= ULPS32.get(op, 1.0), (
        op,
        [each[finite][worst].item() for each in operands],
    )


@pytest.mark.parametrize("op", ops_for("float64"))
def test_random_float64(op: str) -> None:
    operands = samples(op, torch.float64)
    ours, theirs = apply(op, *operands), reference(op)(*operands)
    if SCALAR_OPS[op].result == "bool":
        assert torch.equal(ours, theirs)
        return
    if op == "erfinv":  # near one PyTorch's is no better than 1e-4 on some processors
        (x,) = operands
        far = (x.abs() > 0.9).nonzero().flatten()
        with mpmath.workdps(40):
            exact = [float(mpmath.erfinv(each)) for each in x[far].tolist()]
        theirs[far] = torch.tensor(exact, dtype=torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=3e-14 if op == "digamma" else 2e-15, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", ops_for("float32"))
def test_bits_do_not_depend_on_the_lane(op: str, dtype: torch.dtype) -> None:
    """Vector body or scalar tail, beside large arguments or not: 13 values at every position."""
    few = [each[:13] for each in samples(op, dtype)]
    operands = [each.repeat(N // 13 + 1)[:N] for each in few]
    expected = apply(op, *few).repeat(N // 13 + 1)[:N]
    assert torch.equal(apply(op, *operands).nan_to_num(7), expected.nan_to_num(7))
    operands[0][::13] = 3e30
    ours = apply(op, *operands).nan_to_num(7)
    ours[::13] = expected.nan_to_num(7)[::13]
    assert torch.equal(ours, expected.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", [*(n for n, op in SCALAR_OPS.items() if op.near), *CIRCULAR])
def test_arguments_beyond_the_fast_form(op: str, dtype: torch.dtype) -> None:
    """Beyond what the branch-free forms take, alone and mixed with small ones."""
    generator = torch.Generator().manual_seed(3)
    draws = [torch.rand(N, generator=generator, dtype=torch.float64) for _ in range(3)]
    x = (torch.exp2(draws[0] * 100) * torch.sign(draws[1] - 0.5)).to(dtype)
    operands = (x, draws[2].to(dtype) + 0.1)[: SCALAR_OPS[op].arity]
    ours = apply(op, *operands)
    if op in ("fmod", "remainder"):
        exact = _fractions(op, *operands)
        assert torch.equal(ours, exact.to(dtype))
    else:
        exact = reference(op)(*(each.double() for each in operands))
        plain = exact.abs() < 1e30
        torch.testing.assert_close(ours[plain].double(), exact[plain], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("op", CIRCULAR)
def test_sine_and_cosine_near_their_zeros(op: str) -> None:
    """The floats nearest to multiples of pi/2, where the reduction cancels most digits."""
    quarters = torch.linspace(1, 57000, N, dtype=torch.float64).round()
    x = (quarters * (torch.pi / 2)).float()
    distance = ulps(apply(op, x), reference(op)(x.double()))
    assert distance.max() <= ULPS32.get(op, 1.0), x[int(distance.argmax())].item()


def _fractions(op: str, a: Tensor, b: Tensor) -> Tensor:
    """fmod or remainder in exact integers, rounded once at the end."""
    results = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        left, right = Fraction(x), Fraction(y)
        rest = left % right if op == "remainder" else abs(left) % abs(right) * (1 if x > 0 else -1)
        results.append(float(rest))
    return torch.tensor(results, dtype=torch.float64)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("op", ops_for("int64"))
def test_integers(op: str, name: str) -> None:
    dtype = getattr(torch, name)
    info = torch.iinfo(dtype)
    values = [0, 1, 2, 3, 5, 7, 8, 31, 63, 64, 100, info.max, info.max - 1, info.min]
    if info.min < 0:
        values += [-1, -2, -3, -7, -100, info.min + 1]
    a = torch.tensor(values, dtype=dtype)
    operands = (a,) if SCALAR_OPS[op].arity == 1 else pairs(a)
    if op in NEEDS_NONZERO:
        # INT_MIN / -1 kills eager PyTorch; ours wraps.
        kept = (operands[1] != 0) & ~((operands[1] == -1) & (operands[0] == info.min))
        operands = tuple(each[kept] for each in operands)
    theirs = reference(op)(*operands)
    assert torch.equal(apply(op, *operands), theirs)


def test_integer_division_corners() -> None:
    a = torch.tensor([-(2**63), -(2**63), 5, 0], dtype=torch.int64)
    b = torch.tensor([-1, -1, 0, 0], dtype=torch.int64)
    assert apply("floor_divide", a, b).tolist() == [-(2**63), -(2**63), 0, 0]
    assert apply("remainder", a, b).tolist()[:2] == [0, 0]


BOOL_OPS = "add mul maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor \
logical_not bitwise_not bitwise_and bitwise_or bitwise_xor".split()


def test_bools() -> None:
    target = Target.host()
    loops = [pointwise(op, "bool") for op in BOOL_OPS]
    built = compile_source(render([(each, choose(each, target, {})) for each in loops], target))
    a, b = pairs(torch.tensor([False, True]))
    for op in BOOL_OPS:
        operands = (a, b)[: SCALAR_OPS[op].arity]
        padded = [torch.nn.functional.pad(each, (0, N - 4)) for each in operands]
        out = torch.empty(N, dtype=torch.bool)
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (*padded, out)]
        getattr(built, f"op_{op}_bool")(*pointers, None, ctypes.c_int(1), None)
        assert torch.equal(out[:4], reference(op)(*operands)), op


DTYPES = "float16 bfloat16 float32 float64 uint8 int8 int16 int32 int64 bool".split()


def cast_kernel(source: str, to: str) -> LoopKernel:
    body = [
        Load("a", source, access("a", 1)),
        Apply("y", to, "cast", ("a",)),
        Store("y", to, access("y", 1)),
    ]
    return kernel(f"cast_{source}_{to}", [40], [], {"a": source}, {"y": to}, body)


def test_casts() -> None:
    target = Target.host()
    loops = [cast_kernel(a, b) for a in DTYPES for b in DTYPES]
    built = compile_source(render([(each, choose(each, target, {})) for each in loops], target))
    reals = [0.0, -0.0, 0.4, -0.6, 1.0, 1.5, 2.5, 77.7, 100.0, 2.0**-24, 2.0**-25, 6e-8, 1e-40]
    for source in DTYPES:
        values = [*reals, 65519.0, 65520.0, 1e30, float("nan"), float("inf")]
        whole = [0, 1, 2, 3, 100, 127]
        floating = source.startswith(("float", "bfloat"))
        for to in DTYPES:
            real = floating and to.startswith(("float", "bfloat", "bool"))
            chosen = values if real else reals if floating else whole
            a = torch.zeros(40, dtype=torch.float64 if floating else torch.int64)
            a[: len(chosen)] = torch.tensor(chosen, dtype=a.dtype)
            a = a.to(getattr(torch, source))
            out = torch.empty(40, dtype=getattr(torch, to))
            pointers = [ctypes.c_void_p(each.data_ptr()) for each in (a, out)]
            getattr(built, f"cast_{source}_{to}")(*pointers, None, ctypes.c_int(1), None)
            expected = a.to(out.dtype)
            equal = (out == expected) | ((out != out) & (expected != expected))
            assert equal.all(), (source, to, a, out, expected)


def test_the_table_is_complete() -> None:
    assert all(op.arity in (1, 2, 3) and op.cost > 0 for op in SCALAR_OPS.values())
    assert set(REDUCTIONS) == {"sum", "prod", "max", "min", "any", "all", "welford", "logsumexp"}
