"""How one loop kernel is mapped to the machine: `Schedule`."""

from __future__ import annotations

from dataclasses import dataclass

LARGE_TILE = 64
HOST_RUN = 1024  # kLongestRun of kernels/host/loops.hpp


@dataclass(frozen=True)
class Schedule:
    """kind: 'pointwise', 'row' (lanes along the last inner axis) or 'column' (last outer axis);
    'transpose', 'transpose_row' and 'transpose_column' are these with tiles that are transposed in
    shared memory; 'scan' and 'scan_column' scan along rows and columns.

    lanes: elements per vector (host: lanes of an accumulator). threads: of a CUDA block (of a row
    for 'row', where `rows` share a block; `across` threads of a column block are side by side).
    unroll: vectors in flight per thread. cached: the row stays in registers, or the first `unroll`
    vectors of each thread do, and each sweep reads the others again, `beyond` in flight. shared: a
    cached row is in shared memory instead, unconverted, and each sweep computes from it again; so
    many blocks share a processor. splits: parts of the inner extent that are reduced separately and
    joined in order. flat: vectors of a pointwise kernel begin in each row where addresses are
    aligned, so rows may have any length. cluster: so many blocks share a cached row, each with its
    part in its own shared memory. stays: a cluster takes one row after another. tile: the edge of a
    tile. wide_index: vectors are used with 64-bit offsets, too; otherwise these have single
    elements.
    """

    kind: str
    lanes: int = 1
    threads: int = 256
    rows: int = 1
    across: int = 32
    unroll: int = 1
    cached: bool = False
    beyond: int = 0
    shared: int = 0
    splits: int = 1
    flat: bool = False
    cluster: int = 1
    stays: bool = False
    tile: int = LARGE_TILE
    wide_index: bool = False
