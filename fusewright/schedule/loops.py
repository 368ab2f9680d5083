"""How a loop kernel is mapped to the machine: `LoopKernel` × `Target` → `Schedule`.

Each rule about which schedule fits which kernel is stated once, in `legal`. The heuristic `choose`,
the tuner and the tests all use it. Kernels here are in coalesced form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fusewright.ir.graph import ITEM_BYTES, ZERO, Dim
from fusewright.ir.loop import Load, LoopKernel, scans
from fusewright.schedule.choice import HOST_RUN, LARGE_TILE, Schedule
from fusewright.schedule.cluster_rows import clusters, clusters_fit
from fusewright.schedule.coalesce import coalesce
from fusewright.schedule.flat import flat_fits, flat_rows_fit, flat_vectors
from fusewright.schedule.held_columns import held_column, holds_columns
from fusewright.schedule.index_width import may_be_wide
from fusewright.schedule.row_cache import (
    block_shared_bytes,
    cache_values,
    free_registers,
    row_registers,
    shared_rows,
)
from fusewright.schedule.scans import scan_candidates, scan_fits
from fusewright.schedule.sweeps import Sweeps, early_loads, element_loads, part_bytes, sweeps
from fusewright.schedule.transpose_tiles import (
    TILED,
    mixes_layouts,
    tile_bytes,
    tiled_accesses,
    transposed_axis,
)
from fusewright.schedule.vector_width import column_widths, lanes_fit, prefers_column, widths
from fusewright.target.target import SHARED_BYTES, Target

SMALL_TILE = 32
PROCESSOR_THREADS, FEW_WAVES = 2048, 4
LEAST_FLAT_ROW = 32768  # shorter rows of single elements fit into registers
TILE_REGISTERS = 64  # 4-byte registers for the elements of a tile that a thread has loaded


def legal(kernel: LoopKernel, schedule: Schedule, target: Target) -> bool:
    """Whether the schedule computes this kernel correctly on this target."""
    kernel = coalesce(kernel)
    if scans(kernel) or schedule.kind in ("scan", "scan_column"):
        return scan_fits(kernel, schedule, target)
    plan = sweeps(kernel)
    common = (
        min(schedule.lanes, schedule.threads, schedule.unroll, schedule.splits) >= 1
        and schedule.rows >= 1
        and (schedule.kind in ("pointwise", "transpose")) == (not kernel.inner)
        and (schedule.splits == 1 or splittable(plan))
        and (schedule.cluster == 1 or schedule.kind == "row")
    )
    if not common:
        return False
    if target.language == "host":
        if schedule.flat or schedule.cluster > 1:
            return False
        one_sweep = schedule.kind != "column" or plan.count == 1
        return schedule.lanes <= HOST_RUN and one_sweep and schedule.kind not in TILED
    if schedule.flat and schedule.kind == "row":
        return flat_rows_fit(kernel, schedule.lanes) and _row_fits(kernel, schedule, target)
    if schedule.flat:
        fits = schedule.kind == "pointwise" and flat_fits(kernel, schedule.lanes)
        return fits and 2 * schedule.lanes <= schedule.threads <= 1024
    if not lanes_fit(kernel, schedule.kind, schedule.lanes):
        return False
    match schedule.kind:
        case "pointwise":
            return schedule.threads <= 1024
        case "row":
            return _row_fits(kernel, schedule, target)
        case "column" | "transpose_column":
            return _column_fits(kernel, plan, schedule)
        case "transpose" | "transpose_row":
            return plan.count == 1 and _tile_fits(kernel, schedule)
    return False


def _tile_fits(kernel: LoopKernel, schedule: Schedule) -> bool:
    """Whether threads fill whole rows of a tile, and the tiles fit into shared memory."""
    tile, width = schedule.tile, schedule.threads * schedule.lanes
    return (
        transposed_axis(kernel) is not None
        and tile in (SMALL_TILE, LARGE_TILE)
        and schedule.threads % 32 == 0
        and schedule.threads <= 1024
        and schedule.lanes in (1, 2, 4)
        and tile * tile % (width * (tile // SMALL_TILE)) == 0
        and tile_bytes(kernel, tile) <= SHARED_BYTES
    )


def splittable(plan: Sweeps) -> bool:
    """Whether the inner extent may be split: with one sweep, no element needs a whole row."""
    return plan.count == 1


def _row_fits(kernel: LoopKernel, schedule: Schedule, target: Target) -> bool:
    threads = schedule.threads
    if threads & (threads - 1) or threads * schedule.rows > 1024:
        return False
    if schedule.cluster > 1 or schedule.flat:
        return clusters_fit(kernel, schedule, target)
    if (schedule.rows > 1 and threads > 32) or threads * schedule.rows % 32:
        return False
    if not schedule.cached:
        return not (schedule.beyond or schedule.shared)
    size = kernel.inner_numel
    whole = size.is_static and size.factor <= threads * schedule.lanes * schedule.unroll
    if schedule.splits > 1 or not (whole or schedule.beyond):
        return False
    if schedule.shared:
        return not schedule.beyond and _shared_fits(kernel, schedule, target)
    return _registers_fit(kernel, schedule)


def _shared_fits(kernel: LoopKernel, schedule: Schedule, target: Target) -> bool:
    """Whether shared memory has room for that many rows, one per block."""
    plan = sweeps(kernel)
    alone = schedule.rows == 1 and schedule.threads > 32
    anew = plan.count > 1 and schedule.lanes > 1
    return alone and anew and schedule.shared <= _room(kernel, plan, schedule, target)


def _room(kernel: LoopKernel, plan: Sweeps, schedule: Schedule, target: Target) -> int:
    """How many rows fit into a processor's shared memory."""
    threads = schedule.threads
    taken = block_shared_bytes(kernel, plan, schedule.lanes, threads, schedule.unroll)
    return shared_rows(taken, threads, target.shared_bytes)


def _registers_fit(kernel: LoopKernel, schedule: Schedule) -> bool:
    """Whether a cached row leaves enough registers, also for a second block if parts are read
    again. nvcc keeps what a row has read, whether told to or not."""
    plan, kept = cache_values(kernel, sweeps(kernel))
    taken = row_registers(kernel, plan, kept, schedule.lanes * schedule.unroll)
    threads = schedule.threads * schedule.rows * (1 + (schedule.beyond > 0))
    return taken <= free_registers(threads)


def kept_sweeps(
    kernel: LoopKernel, schedule: Schedule, target: Target
) -> tuple[Sweeps, dict[str, int]]:
    """The sweeps of a coalesced kernel, and the values that are cached between sweeps: in memory on
    the host, and on a GPU in the registers of a row or column that is cached whole."""
    plan = sweeps(kernel)
    held = schedule.cached and not (schedule.beyond or schedule.shared)
    rows = schedule.kind == "row" and target.language == "host"
    keeps = rows or (schedule.kind in ("row", "column", "transpose_column") and held)
    return cache_values(kernel, plan) if keeps else (plan, {})


def _column_fits(kernel: LoopKernel, plan: Sweeps, schedule: Schedule) -> bool:
    threads, across = schedule.threads, schedule.across
    shared = threads * schedule.lanes * 4 * part_bytes(plan) // 8
    one_sweep = schedule.kind == "column" and plan.count == 1 and shared <= SHARED_BYTES // 2
    return (
        threads % 32 == 0
        and threads <= 1024
        and across >= 1
        and threads % across == 0
        and (holds_columns(kernel, schedule) if schedule.cached else one_sweep)
    )


def workspace_bytes(kernel: LoopKernel, schedule: Schedule, target: Target) -> Dim:
    """Scratch memory of one call, in bytes; the same on either target."""
    if schedule.splits == 1:
        return ZERO
    kernel = coalesce(kernel)
    return kernel.outer_numel * (schedule.splits * part_bytes(sweeps(kernel)))


def choose(kernel: LoopKernel, target: Target, sizes: Mapping[str, int]) -> Schedule:
    """The first legal schedule that the heuristic proposes, best first."""
    kernel = coalesce(kernel)
    for schedule in candidates(kernel, target, sizes):
        if legal(kernel, schedule, target):
            return schedule
    if scans(kernel):
        return Schedule("scan")
    return Schedule("row" if kernel.inner else "pointwise")


def candidates(kernel: LoopKernel, target: Target, sizes: Mapping[str, int]) -> Iterator[Schedule]:
    """Schedules to try, best guess first; some may not be legal."""
    wide = target.language == "cuda" and may_be_wide(kernel, sizes)
    yield from (replace(each, wide_index=wide) for each in _proposed(kernel, target, sizes))


def _proposed(kernel: LoopKernel, target: Target, sizes: Mapping[str, int]) -> Iterator[Schedule]:
    if scans(kernel):
        yield from scan_candidates(kernel, target, sizes)
        return
    if target.transposing and mixes_layouts(kernel, sizes):
        yield from _tiles(kernel, target, sizes)
    if not kernel.inner:
        yield from _pointwise(kernel, target, sizes)
        return
    if target.online and (held := held_column(kernel, sizes)):
        yield held
    kinds = ("column", "row") if prefers_column(kernel, sizes) else ("row",)
    for kind in kinds:
        if target.language == "host":
            yield _host_reduction(kernel, kind, sizes)
        elif kind == "row":
            yield from _rows(kernel, target, sizes)
        else:
            yield from _columns(kernel, target, sizes)


def _tiles(kernel: LoopKernel, target: Target, sizes: Mapping[str, int]) -> Iterator[Schedule]:
    transposed = transposed_axis(kernel)
    assert transposed is not None
    kind, threads = "transpose_row" if kernel.inner else "transpose", 256
    loads = [item for item in tiled_accesses(kernel) if isinstance(item, Load)]
    held = sum(max(4, ITEM_BYTES[x.dtype]) // 4 for x in loads if x.access.strides[-1].factor)
    lengths = [kernel.axes[at].size.at(sizes) for at in (transposed, len(kernel.axes) - 1)]
    large = held * LARGE_TILE * LARGE_TILE // threads <= TILE_REGISTERS and min(lengths) > 48
    for tile in (LARGE_TILE, SMALL_TILE) if large else (SMALL_TILE,):
        splits = 1
        if kernel.inner:
            rows, inner = kernel.outer_numel.at(sizes), kernel.inner_numel.at(sizes)
            within = transposed >= len(kernel.outer)
            blocks = rows if within else rows // lengths[0] * -(-lengths[0] // tile)
            splits = _splits(blocks, inner, tile * tile if within else tile, 16, target.sms)
        # Single elements with large tiles need more addresses than there are registers.
        for lanes in widths(kernel, kind):
            if lanes > 1 or tile == SMALL_TILE:
                yield Schedule(kind, min(lanes, 4), threads, splits=splits, tile=tile)


def _pointwise(kernel: LoopKernel, target: Target, sizes: Mapping[str, int]) -> Iterator[Schedule]:
    if target.language == "host":
        yield Schedule("pointwise", lanes=HOST_RUN)
        return
    found = [item for item in kernel.body if isinstance(item, Load)]
    loads, buffers = len(found), len({item.access.buffer for item in found})
    moving = sum(item.access.strides[-1] != ZERO for item in found if kernel.outer)
    numel = kernel.outer_numel.at(sizes)
    if flat := flat_vectors(kernel, sizes):
        yield flat
    for lanes in widths(kernel, "pointwise"):
        # Full vectors: one per thread, and many threads (H200: 2–4 % faster than two in flight).
        # Single elements: eight loads in flight per thread, unless that leaves processors idle.
        # More if some loads find in the cache what others have read, as for neighbours or broadcast
        # rows (averages of 8 neighbours, 1.1 GB in all: 636 µs with one element per thread, 403
        # with two, 404 with four; of 3x3 246, 189 and 192; differences of four 324 with two, 295
        # with four).
        unroll = 1 if lanes > 1 else max(1, 8 // max(1, loads), min(4, 8 // max(1, moving)))
        if lanes == 1 and loads > buffers:
            unroll = max(unroll, 4 if loads <= 8 else 2)
        while unroll > 1 and numel < target.sms * PROCESSOR_THREADS * lanes * unroll:
            unroll //= 2
        # Two vectors per thread shorten runs of few waves (2 M elements of three operands: 10.0 and
        # 9.3 µs; 4 M 13.9 and 13.6; 64 M 130.7 and 131.5).
        waves = numel / (lanes * target.sms * PROCESSOR_THREADS)
        threads, unroll = (128, 2) if lanes > 1 and 1 < waves <= FEW_WAVES else (256, unroll)
        yield Schedule("pointwise", lanes=lanes, threads=threads, unroll=unroll)


def _rows(kernel: LoopKernel, target: Target, sizes: Mapping[str, int]) -> Iterator[Schedule]:
    plan = sweeps(kernel)
    inner, outer = kernel.inner_numel.at(sizes), kernel.outer_numel.at(sizes)
    loads = len(element_loads(kernel, plan))
    widest = next(widths(kernel, "row"))
    if plan.count > 1 and inner > LEAST_FLAT_ROW and not lanes_fit(kernel, "row", widest):
        yield from clusters(kernel, plan, inner, widest, target, flat=True)
    for lanes in widths(kernel, "row"):
        if lanes > 1 and not lanes_fit(kernel, "row", lanes):
            continue
        if plan.count > 1:
            yield from _cached_rows(kernel, plan, inner, lanes, target)
        threads = _row_threads(inner, lanes)
        rows = max(1, 128 // threads) if threads <= 32 else 1
        threads = min(threads, 256) if splittable(plan) else threads
        unroll = max(1, (4 if lanes > 1 else 8) // max(1, loads // 2))
        splits = 1
        if splittable(plan) and outer < 8 * target.sms:
            splits = _splits(outer, inner, threads * lanes * unroll, 32, target.sms)
        yield Schedule("row", lanes, threads, rows=rows, unroll=unroll, splits=splits)


def _cached_rows(
    kernel: LoopKernel, plan: Sweeps, inner: int, lanes: int, target: Target
) -> Iterator[Schedule]:
    """A row in the registers of at most one warp, otherwise of a block; the fewest threads first.

    A row of 1024 threads has a processor to itself, which idles while they wait for each other. Two
    blocks that hold a quarter of their rows or more come before it, unless its threads fill their
    registers and so have as many loads in flight (H200, 1 GB of floats in rows of 32768: softmax
    267 µs whole, 298 in part; layer norm of 16384, which 4 vectors hold, 298 and 266). If two or
    three rows of narrow elements fit into shared memory, blocks of 512 threads with a row each come
    before both (bf16, rows of 32768: softmax 96 % of copy's rate, 75 whole, 89 in part). Rows with
    a second operand were not measured.
    """
    loads = len(element_loads(kernel, plan))
    most = (8 if loads == 1 else 4) if lanes > 1 else 16
    for threads in (4, 8, 16, 32, 64, 128, 256, 512):
        unroll = max(1, -(-inner // (threads * lanes)))
        rows = max(1, 128 // threads) if threads <= 32 else 1
        row = Schedule("row", lanes, threads, rows=rows, unroll=unroll, cached=True)
        if threads == 512 and lanes > 4 and unroll > 4 and len(early_loads(kernel, plan)) <= 1:
            room = _room(kernel, plan, row, target)
            if room > 1:
                yield replace(row, shared=room)
        if unroll <= most:
            yield row
    unroll = max(1, -(-inner // (1024 * lanes)))
    whole = Schedule("row", lanes, 1024, unroll=unroll, cached=True)
    in_part = [
        Schedule("row", lanes, 512, unroll=held, cached=True, beyond=max(1, 8 // lanes))
        for held in (most, most // 2)
        if lanes > 1 and 1 < inner / (512 * lanes * held) <= 4
    ]
    full = 4 < unroll <= 8 or (lanes > 4 and loads > 1)
    held = tuple(clusters(kernel, plan, inner, lanes, target))
    # Clusters keep more copies in flight than half a row in registers does.
    first, last = (held, ()) if lanes > 1 and not full else ((), held)
    yield from (*first, *((whole, *in_part) if full else (*in_part, whole)), *last)


def _row_threads(inner: int, lanes: int) -> int:
    """Threads for one row: a few vectors each."""
    if inner <= 32 * lanes * 8:
        return next((each for each in (4, 8, 16) if each * lanes * 2 >= inner), 32)
    return 128 if inner <= 128 * lanes * 8 else 256 if inner <= 1 << 16 else 512


def _splits(blocks: int, inner: int, pass_elements: int, blocks_per_sm: int, sms: int) -> int:
    """Parts of the inner extent, so that the last wave of blocks is a small share of all.

    Each part has at least three steps of its block; with fewer, joining does not pay.
    """
    most = inner // (3 * pass_elements)
    wanted = -(-blocks_per_sm * sms // max(1, blocks))
    return max(1, min(most, wanted, 4096))


def _columns(kernel: LoopKernel, target: Target, sizes: Mapping[str, int]) -> Iterator[Schedule]:
    inner, outer = kernel.inner_numel.at(sizes), kernel.outer_numel.at(sizes)
    loads = len(element_loads(kernel, sweeps(kernel)))
    for lanes in column_widths(kernel):
        if lanes > 1 and not lanes_fit(kernel, "column", lanes):
            continue
        across = 32
        while across > 1 and across * lanes >= 2 * outer:
            across //= 2
        threads = 256
        blocks = -(-outer // (across * lanes))
        unroll = 4 if loads <= 2 else 2
        splits = _splits(blocks, inner, threads // across * unroll, 32, target.sms)
        for size in (threads, 128, 64):
            yield Schedule(
                "column", lanes, size, across=min(across, size), unroll=unroll, splits=splits
            )


def _host_reduction(kernel: LoopKernel, kind: str, sizes: Mapping[str, int]) -> Schedule:
    """Splits depend on the sizes alone, never on the threads: results must be reproducible."""
    inner, outer = kernel.inner_numel.at(sizes), kernel.outer_numel.at(sizes)
    lanes = 64 if kind == "row" else HOST_RUN
    tasks = outer if kind == "row" else -(-outer // lanes)
    splits = 1
    if splittable(sweeps(kernel)) and tasks < 64:
        splits = max(1, min(64 // max(1, tasks), inner * outer // 65536))
    return Schedule(kind, lanes=lanes, splits=splits)
