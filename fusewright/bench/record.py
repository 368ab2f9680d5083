"""The result of benchmarking one problem: frozen values that are written to JSON and read back.

Everything that a table or a chart needs is here, so a report can be drawn from the file alone.
`docs/bench.md` describes each field. An incompatible change raises `VERSION`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fusewright.tune.neighbours import warning

SCHEMA = "fusewright-bench"
COLLECTION = "fusewright-bench-collection"
VERSION = 1

PASSES = ("forward", "train")
BASELINES = ("eager", "compile", "max-autotune", "cudagraphs")


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    device: str
    mode: str = "train"
    passes: tuple[str, ...] = PASSES
    baselines: tuple[str, ...] = BASELINES[:2]
    quick: bool = False
    budget_s: float = 10.0
    input_sets: int = 4
    least_rounds: int = 20
    most_rounds: int = 2000
    target_width: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Clocks:
    """The GPU's clocks at one moment; `when` names the phase that had just ended."""

    when: str
    sm_mhz: float
    memory_mhz: float
    power_w: float
    temperature_c: float


@dataclass(frozen=True)
class Environment:
    """`other_cores` is how many CPU cores other processes used in the pass in which they used most.

    `source_sha256` is the hash of Fusewright's own code, which may have changed since `commit`.
    """

    device: str
    cpu: str
    driver: str
    versions: Mapping[str, str]
    flags: Mapping[str, str]
    variables: Mapping[str, str]
    commit: str
    command: str
    clocks: tuple[Clocks, ...] = ()
    other_cores: float = 0.0
    source_sha256: str = ""

    @property
    def busy(self) -> str:
        """A warning if other processes used half a core or more while we timed."""
        return warning(self.other_cores)


@dataclass(frozen=True)
class Rates:
    """Rates measured in this run; `products` maps fp32, tf32, fp16, bf16 to matmul operations/s."""

    copy_bytes_per_s: float
    products: Mapping[str, float]


@dataclass(frozen=True)
class ClockFacts:
    """How time was taken; `idle_gap_us` is the time of a device synchronization alone."""

    kind: str
    cache_bytes: int
    flush_bytes: int
    idle_gap_us: float


@dataclass(frozen=True)
class Floor:
    """The least work that any program must do for this pass, and its time at the measured rates.

    `floor_us` maps memory to the copy time of `bytes`, and each class to the longer of that and
    the time of `operations` at the class's matmul rate.
    """

    bytes: int
    operations: int
    floor_us: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True)
class Timing:
    """All samples in the order they were taken, and their median with its 95 % interval.

    `counted` is "device" if the candidate works outside the current stream, so that the whole
    device's time counts; "stream" if it does not; "wall" on a CPU.
    """

    samples_us: tuple[float, ...]
    median_us: float
    low_us: float
    high_us: float
    minimum_us: float
    converged: bool
    counted: str


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as a baseline; the interval is a bootstrap over whole rounds."""

    baseline: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class ValueCheck:
    """One output, gradient or buffer against float64.

    `error` is ‖x − truth‖ / ‖truth‖. `largest` is the largest single deviation over the root mean
    square of the truth. `limits` are the largest errors that each class accepts. `precision` is
    empty if the value is wrong.
    """

    when: str
    name: str
    error: float
    eager_error: float
    largest: float
    limits: Mapping[str, float]
    precision: str
    ok: bool
    note: str = ""


@dataclass(frozen=True)
class StepTime:
    """A step of our plan in the profile; rates and shares are None if unknown."""

    graph: str
    step: str
    kind: str
    kernels: tuple[str, ...]
    launches: float
    time_us: float | None
    bytes: int
    operations: int
    bytes_per_s: float | None
    operations_per_s: float | None
    roof_us: float | None
    roof_share: float | None


@dataclass(frozen=True)
class KernelTime:
    """A device kernel (on a CPU: a top-level operator) of one call, summed over its launches."""

    name: str
    launches: float
    time_us: float


@dataclass(frozen=True)
class Result:
    """One candidate in one pass. The status is timed, wrong, failed or skipped.

    `floor_share` is the floor of the candidate's own precision class over its median.
    """

    candidate: str
    status: str
    note: str = ""
    precision: str = ""
    timing: Timing | None = None
    floor_share: float | None = None
    ratios: tuple[Ratio, ...] = ()
    checks: tuple[ValueCheck, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    steps: tuple[StepTime, ...] = ()
    kernel_launches: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Pass:
    """`busy_us` is how long the device was kept busy before each call, so that the host's time to
    launch the call does not count."""

    name: str
    mode: str
    rounds: int
    seconds: float
    floor: Floor | None
    results: tuple[Result, ...]
    busy_us: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Costs besides the time of a call; None if they do not apply or were not measured.

    `optimize_seconds` is our capture and planning. A cold build is the first call of every pass
    with empty caches, a warm build the same with full caches.
    """

    optimize_seconds: float | None = None
    cold_build_seconds: float | None = None
    warm_build_seconds: float | None = None
    overhead_us: float | None = None
    overhead_method: str = ""
    file_bytes: int | None = None


@dataclass(frozen=True)
class CandidateFacts:
    """`kind` is a baseline's name, ours or foreign."""

    name: str
    kind: str
    path: str = ""
    note: str = ""
    costs: Costs = field(default_factory=Costs)


@dataclass(frozen=True)
class PlanStep:
    """`kind` is a kind of kernel, call or view."""

    name: str
    kind: str
    operators: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    bytes: int
    operations: int
    reason: str = ""


@dataclass(frozen=True)
class PlanGraph:
    """One graph of our plan: steps in launch order; `values` gives each value's type and shape."""

    mode: str
    graph: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: Mapping[str, str]
    steps: tuple[PlanStep, ...]


@dataclass(frozen=True)
class ProblemFacts:
    name: str
    path: str
    source_sha256: str
    inputs: tuple[str, ...] = ()
    parameters: int = 0


@dataclass(frozen=True)
class Record:
    """One problem. The status is ok, failed, timeout or crashed; only ok has passes."""

    problem: ProblemFacts
    settings: Settings
    status: str = "ok"
    error: str = ""
    started_at: str = ""
    seconds: float = 0.0
    environment: Environment | None = None
    rates: Rates | None = None
    clock: ClockFacts | None = None
    candidates: tuple[CandidateFacts, ...] = ()
    passes: tuple[Pass, ...] = ()
    plan: tuple[PlanGraph, ...] = ()

    @property
    def subjects(self) -> tuple[str, ...]:
        """The candidates that are not baselines: ours and foreign ones."""
        return tuple(each.name for each in self.candidates if each.kind in ("ours", "foreign"))

    @property
    def results(self) -> Iterator[tuple[Pass, Result]]:
        return ((each, result) for each in self.passes for result in each.results)

    @property
    def judged(self) -> Iterator[tuple[Pass, Result]]:
        """The results of all candidates that are not baselines."""
        return (pair for pair in self.results if pair[1].candidate in self.subjects)


@dataclass(frozen=True)
class Spread:
    """Speedups over many problems against one baseline in one pass.

    `count` of the run's `problems` have both times; the shares refer to these.
    """

    pass_name: str
    candidate: str
    baseline: str
    count: int
    geometric_mean: float
    median: float
    shares: Mapping[str, float]
    problems: int = 0


@dataclass(frozen=True)
class Collection:
    """Many problems of one run."""

    records: tuple[Record, ...]
    spreads: tuple[Spread, ...] = ()
