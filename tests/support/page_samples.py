"""Records as an H200 would give them, made up: nothing here was measured.

One problem with every kind of candidate (right, TF32, wrong, failed, skipped), and a folder with
a slow one, a wrong one, a crash and a time-out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusewright.bench.record import (
    CandidateFacts,
    ClockFacts,
    Clocks,
    Costs,
    Environment,
    Floor,
    KernelTime,
    Pass,
    PlanGraph,
    PlanStep,
    ProblemFacts,
    Rates,
    Ratio,
    Record,
    Result,
    Settings,
    StepTime,
    Timing,
    ValueCheck,
)

BASELINES = ("eager", "compile", "max-autotune", "cudagraphs")
RATES = Rates(4.12e12, {"fp32": 52.3e12, "tf32": 412e12, "fp16": 744e12, "bf16": 751e12})
LIMITS = {"fp32": 2.4e-6, "tf32": 1.1e-3, "bf16": 9.6e-3}
ERRORS = {"fp32": 2.1e-7, "tf32": 2.9e-4, "bf16": 2.3e-3, "": 0.31}
HOSTILE = "<script>alert(1)</script>"


@dataclass(frozen=True)
class Entry:
    """A candidate's times in microseconds per pass and its class; no class means wrong."""

    kind: str
    times_us: Mapping[str, float]
    precision: str = "fp32"


ENTRIES: Mapping[str, Entry] = {
    "eager": Entry("eager", {"forward": 412.0, "train": 1290.0}),
    "compile": Entry("compile", {"forward": 371.0, "train": 1104.0}),
    "max-autotune": Entry("max-autotune", {"forward": 352.0, "train": 1061.0}),
    "cudagraphs": Entry("cudagraphs", {"forward": 398.0, "train": 1247.0}),
    "ours": Entry("ours", {"forward": 268.0, "train": 781.0}),
    "gemm_tensor_cores": Entry("foreign", {"forward": 121.0, "train": 402.0}, "tf32"),
    "gemm_forgets_bias": Entry("foreign", {"forward": 118.0, "train": 395.0}, ""),
}

ENVIRONMENT = Environment(
    device="NVIDIA H200 (sm_90, 132 SMs, 139.8 GiB)",
    cpu="Intel(R) Xeon(R) Platinum 8568Y+, 16 cores",
    driver="570.133.20",
    versions={"torch": "2.13.0+cu130", "cuda": "13.0", "cudnn": "91002", "python": "3.11.9"},
    flags={"float32_matmul_precision": "highest", "cuda.matmul.allow_tf32": "False"},
    variables={"OMP_NUM_THREADS": "16"},
    commit="0981263aa41c5a2f6bd5a44f2ab9ea5d3f2a9c11",
    command="python -m fusewright bench examples/gemm_add_relu.py rivals/*.py --html report.html",
    clocks=(
        Clocks("measure rates", 1980.0, 3201.0, 512.0, 47.0),
        Clocks("train", 1965.0, 3201.0, 498.0, 51.0),
    ),
)


def timing(median_us: float, seed: int, rounds: int = 60) -> Timing:
    draw = random.Random(seed)
    samples = tuple(round(median_us * draw.lognormvariate(0.0, 0.012), 2) for _ in range(rounds))
    middle = sorted(samples)[rounds // 2]
    return Timing(samples, middle, middle * 0.996, middle * 1.005, min(samples), True, "stream")


def checks(precision: str, names: Sequence[str], seed: int) -> tuple[ValueCheck, ...]:
    draw = random.Random(seed)
    rows = []
    for when in ("before", "after"):
        for index, name in enumerate(names):
            bad = not precision and index == 0
            error = ERRORS[precision if bad or precision else "fp32"] * draw.uniform(0.6, 1.6)
            note = "the error is beyond every precision class" if bad else ""
            found = "" if bad else precision or "fp32"
            row = ValueCheck(
                when, name, error, ERRORS["fp32"], error * 6, LIMITS, found, not bad, note
            )
            rows.append(row)
    return tuple(rows)


def results(
    entries: Mapping[str, Entry], pass_name: str, floors: Mapping[str, float]
) -> tuple[Result, ...]:
    names = ["output 0"] + ["gradient of fc.weight", "gradient of bias"] * (pass_name == "train")
    medians = {
        name: timing(each.times_us[pass_name], hash_of(name + pass_name))
        for name, each in entries.items()
    }
    found = []
    for name, each in entries.items():
        checked = checks(each.precision, names, hash_of(name))
        if not each.precision:
            note = f"output 0 before timing: error {checked[0].error:.1e}"
            found.append(Result(name, "wrong", note, checks=checked))
            continue
        ratios = tuple(
            Ratio(base, value, value * 0.992, value * 1.009)
            for base in BASELINES
            if base in entries and base != name
            for value in [medians[base].median_us / medians[name].median_us]
        )
        found.append(
            Result(
                name,
                "timed",
                precision=each.precision,
                timing=medians[name],
                floor_share=floors[each.precision] / medians[name].median_us,
                ratios=ratios,
                checks=checked,
                kernels=(KernelTime("sm90_gemm<128, 256>", 1.0, medians[name].median_us * 0.8),),
                steps=steps(pass_name, medians[name].median_us) if each.kind == "ours" else (),
                kernel_launches=3.0,
                peak_bytes=403_000_000,
            )
        )
    return tuple(found)


def hash_of(text: str) -> int:
    """The same number in every process, which Python's own hash is not."""
    return sum(index * ord(letter) for index, letter in enumerate(text, 1))


def steps(pass_name: str, total_us: float) -> tuple[StepTime, ...]:
    graphs = ("inference",) if pass_name == "forward" else ("forward", "backward")
    shares = {"inference": 0.97, "forward": 0.33, "backward": 0.62}
    rows = []
    for graph in graphs:
        for each in PLANS[graph]:
            if each.kind == "view":
                continue
            big = each.kind == "matmul"
            weight = 0.8 if big else 0.2 / max(len(PLANS[graph]) - 1, 1)
            time_us = total_us * shares[graph] * weight
            memory = each.bytes / RATES.copy_bytes_per_s * 1e6
            roof = max(memory, each.operations / RATES.products["fp32"] * 1e6) if big else memory
            rows.append(
                StepTime(
                    graph,
                    each.name,
                    each.kind,
                    (f"void fw::{each.name}<128, 256>(float const*, float*)",),
                    1.0,
                    time_us,
                    each.bytes,
                    each.operations,
                    each.bytes / time_us * 1e6,
                    each.operations / time_us * 1e6,
                    roof,
                    min(roof / time_us, 0.99),
                )
            )
    return tuple(rows)


def _step(
    name: str, kind: str, operators: str, sizes: tuple[int, int], reason: str = ""
) -> PlanStep:
    return PlanStep(
        name, kind, tuple(operators.split()), ("x", "weight"), ("out",), *sizes, reason=reason
    )


PLANS: Mapping[str, tuple[PlanStep, ...]] = {
    "inference": (
        _step("t", "view", "aten.t.default", (0, 0)),
        _step(
            "custom_gemm_add_relu",
            "matmul",
            "aten.mm.default aten.add.Tensor aten.relu.default",
            (184_549_376, 8_589_934_592),
        ),
    ),
    "forward": (
        _step(
            "custom_gemm_add_relu",
            "matmul",
            "aten.mm.default aten.add.Tensor aten.relu.default aten.gt.Scalar",
            (188_743_680, 8_589_934_592),
        ),
    ),
    "backward": (
        _step(
            "custom_where_sum",
            "loop",
            "aten.where.self aten.mul.Tensor aten.sum.dim_IntList",
            (134_217_728, 33_554_432),
        ),
        _step(
            "mm",
            "call",
            "aten.mm.default",
            (167_772_160, 17_179_869_184),
            "a product with a transposed left operand is not fused yet",
        ),
    ),
}


def plan_graphs(mode: str = "train") -> tuple[PlanGraph, ...]:
    values = {"x": "f32[1024, 8192]", "weight": "f32[8192, 512]", "out": "f32[1024, 512]"}
    return tuple(
        PlanGraph(mode, name, ("x", "weight"), ("out",), values, steps)
        for name, steps in PLANS.items()
    )


def costs(kind: str) -> Costs:
    match kind:
        case "eager":
            return Costs(overhead_us=14.2, overhead_method="until the call returns")
        case "compile":
            return Costs(None, 9.1, 1.2, 31.5, "until the call returns")
        case "max-autotune":
            return Costs(None, 74.0, 1.9, 33.0, "until the call returns")
        case "ours":
            return Costs(6.4, 21.8, 0.04, 18.9, "until the call returns", 23_412)
        case _:
            return Costs(None, 48.0, 0.9, 22.1, "until the call returns", 9_120)


def record(
    name: str = "gemm_add_relu",
    entries: Mapping[str, Entry] = ENTRIES,
    passes: tuple[str, ...] = ("forward", "train"),
) -> Record:
    """A whole record; `entries` decides who is in it and how fast."""
    least = {"forward": (184_549_376, 8_589_934_592), "train": (369_098_752, 25_769_803_776)}
    made = []
    for each in passes:
        size, operations = least[each]
        memory = size / RATES.copy_bytes_per_s * 1e6
        floors = {"memory": memory} | {
            kind: max(memory, operations / rate * 1e6) for kind, rate in RATES.products.items()
        }
        found = results(entries, each, floors)
        made.append(Pass(each, "train", 60, 4.2, Floor(size, operations, floors), found))
    return Record(
        problem=ProblemFacts(
            name, f"examples/{name}.py", "ab" * 32, ("f32[1024, 8192]",), 4_194_816
        ),
        settings=Settings("cuda", baselines=BASELINES, passes=passes),
        started_at="2025-01-01T12:00:00+00:00",
        seconds=142.0,
        environment=ENVIRONMENT,
        rates=RATES,
        clock=ClockFacts("events", 52_428_800, 134_217_728, 4.1),
        candidates=tuple(
            CandidateFacts(key, each.kind, f"rivals/{key}.py", costs=costs(each.kind))
            for key, each in entries.items()
        ),
        passes=tuple(made),
        plan=plan_graphs(),
    )


def with_failures() -> Record:
    """The record above with a candidate that failed and one that was skipped."""
    whole = record()
    extra = (
        Result("broken", "failed", "RuntimeError: CUDA error: an illegal memory access"),
        Result("cudagraphs-2", "skipped", "needs a GPU"),
    )
    facts = (CandidateFacts("broken", "foreign"), CandidateFacts("cudagraphs-2", "cudagraphs"))
    return replace(
        whole,
        candidates=whole.candidates + facts,
        passes=tuple(replace(each, results=each.results + extra) for each in whole.passes),
    )


def failed(name: str, status: str, words: str) -> Record:
    return Record(
        ProblemFacts(name, f"problems/{name}.py", "cd" * 32), Settings("cuda"), status, words
    )


def scaled(factor: float, precision: str = "fp32") -> dict[str, Entry]:
    """Only the baselines and ours, ours `factor` times faster than above."""
    chosen = {key: each for key, each in ENTRIES.items() if each.kind != "foreign"}
    ours = {key: value / factor for key, value in ENTRIES["ours"].times_us.items()}
    chosen["ours"] = Entry("ours", ours, precision)
    return chosen


def folder(count: int = 14) -> tuple[Record, ...]:
    """Many problems: most faster, some slower, and one of every kind of trouble."""
    draw = random.Random(7)
    records = [
        record(f"{index:02d}_problem_{index}", scaled(min(draw.lognormvariate(0.05, 0.3), 1.58)))
        for index in range(1, count + 1)
    ]
    return (
        *records,
        record("60_matmul_min_subtract_multiply_with_a_long_name", scaled(1.6)),
        record("61_wrong_bias", scaled(1.1, "")),
        record("62_lower_precision", scaled(2.2, "tf32")),
        failed("90_conv3d_softmax", "crashed", "the process died with signal 11 (SIGSEGV)"),
        failed("91_huge_lstm", "timeout", "stopped after 600 s, while: build max-autotune"),
        failed("92_no_import", "failed", "ProblemError: No module named 'flash_attn'"),
    )
